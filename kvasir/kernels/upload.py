"""Copies many small host arrays to the device at once, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, flat, as views of one buffer that travels in one copy."""
    if device.type == "cpu":
        # copies, because the caller may reuse its arrays
        return [torch.from_numpy(array.reshape(-1).astype(np.int32)) for array in arrays]
    sizes = [array.size for array in arrays]
    # pinned memory comes from torch's caching allocator, which reuses it only after the copy has been made
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[at : at + size] = array.reshape(-1)
        at += size
    return list(packed.to(device, non_blocking=True).split(sizes))
