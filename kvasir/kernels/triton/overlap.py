"""Programmatic dependent launch: a kernel is put on the device while the one before it still finishes.

Between two kernels of a graph lies about a microsecond, in which nothing is read. A kernel launched with `early` is
there already when the one before it ends. It may touch nothing that this one writes until `await_previous`, which must
be reached by each of its programs: whoever comes next relies on all before being done once this one is. What was there
before that kernel began, it may read: weights, and what a step is told (lengths, tables), but those past the
processor's own cache, which may hold what stood there in an earlier step.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(PDL: tl.constexpr):
    """All that earlier kernels wrote is there from here on. The next kernel may come now, and wait in its turn."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def early(x: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel that calls `await_previous` on x's device."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _is_known_to(x.device.index) else {"PDL": False}


@cache
def _is_known_to(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)
