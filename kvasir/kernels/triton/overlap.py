"""Programmatic dependent launch: a kernel is placed on the device while the kernel before it still finishes.

Between two kernels of a graph the device idles for about a microsecond. A kernel launched with `early` is already in
place when its predecessor ends. Until `await_previous` it must not touch anything that the predecessor writes, and each
of its programs must reach `await_previous`: the next kernel relies on all earlier ones being done once this one is. It
may read earlier what was there before the predecessor began: weights, and a step's inputs (lengths, tables). Those
inputs must be read past the processor's own cache, which may hold the values of an earlier step.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote is visible, and let the next kernel be placed."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def early(x: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel that calls `await_previous` on x's device."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _is_known_to(x.device.index) else {"PDL": False}


@cache
def _is_known_to(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)
