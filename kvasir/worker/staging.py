"""Moving small arrays between host and device without waiting: many host arrays in one upload, results read later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import StepResult


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, flat, as views of one buffer that travels in one copy."""
    sizes = [array.size for array in arrays]
    # pinned memory comes from torch's caching allocator, which reuses it only after the copy has been made
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[at : at + size] = array.reshape(-1)
        at += size
    return list(packed.to(device, non_blocking=True).split(sizes))


class DeviceResult:
    """Device tensors on their way to the host; `finish` makes a StepResult of them once they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor], finish: Callable[..., StepResult]) -> None:
        self._finish = finish
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for target, source in zip(self._host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = [t.cpu() for t in tensors]

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return self._finish(*(t.numpy() for t in self._host))
