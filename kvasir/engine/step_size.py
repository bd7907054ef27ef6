"""Step size after the device ran out of memory: smaller at first, then larger again. Core process."""

from __future__ import annotations

from kvasir.engine.scheduler import Scheduler
from kvasir.log import get_logger

logger = get_logger(__name__)
_TRIES = 3  # at the smallest size
_GOOD_STEPS = 64  # successful steps before steps grow again; doubled after every failure ...
_MAX_GOOD_STEPS = 1 << 14  # ... up to this number


class StepSize:
    """A step that fails is tried again at the same size first, since its memory was released and other processes may
    have released theirs. After that steps are half as large, and double again after enough successful ones."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.limits.max_num_batched_tokens
        self._enough = min(self._full, scheduler.limits.max_num_seqs)  # below this some rows would have to wait
        self.is_normal = True  # steps have their full size, and the last failure is long ago
        self._failures = 0  # at this size
        self._good_steps = 0
        self._needed_steps = _GOOD_STEPS

    def failed(self, num_tokens: int) -> bool:
        """A step of `num_tokens` did not fit. False if there is nothing left to try."""
        self.is_normal = False
        self._failures += 1
        self._good_steps = 0
        self._needed_steps = min(2 * self._needed_steps, _MAX_GOOD_STEPS)
        limit, smaller = self._scheduler.limits.max_num_batched_tokens, max(num_tokens // 2, 1)
        if limit > self._enough:
            smaller = max(smaller, self._enough)
        if self._failures > 1 and smaller < limit and self._scheduler.limits.chunked_prefill:
            self._scheduler.limit_steps(smaller)
            self._failures = 1  # if a step of the new size fails, the next is smaller at once
        logger.warning(
            "a step of %d tokens did not fit the device's memory: all requests are recomputed, in steps of at most "
            "%d for now. To avoid this, lower gpu_memory_utilization or max_num_batched_tokens.",
            num_tokens, self._scheduler.limits.max_num_batched_tokens,
        )  # fmt: skip
        return self._failures < _TRIES

    def fitted(self) -> None:
        """A step was successful, at less than the full size or soon after a failure."""
        self._good_steps += 1
        if self._good_steps >= self._needed_steps:
            self._good_steps = self._failures = 0
            limit = self._scheduler.limits.max_num_batched_tokens
            self.is_normal = limit == self._full
            self._scheduler.limit_steps(min(2 * limit, self._full))
