"""Results on their way from the device, read later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvasir.messages import StepResult


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
