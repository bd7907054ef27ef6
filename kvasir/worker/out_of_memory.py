"""Which errors say that a device's memory ran out. Worker process."""

from __future__ import annotations

import re

import torch

# Memory that torch's allocator did not hand out fails in other words: a graph's own (torch.AcceleratorError), that of a
# kernel's code (Triton) or of the math library's workspace, the host's. None of these errors has a type of its own.
_WORDS = re.compile(
    r"\b(CUDA|HIP)\b[^\n]*\bout of memory\b"
    r"|\b(CU|HIP)BLAS(LT)?_STATUS_ALLOC_FAILED\b"
    r"|\bDefaultCPUAllocator: (can't allocate|not enough) memory\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it may go well with less, or later."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
