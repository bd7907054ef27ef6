"""How many tokens a step may have after the device's memory ran out: fewer, then more again. Core process."""

from __future__ import annotations

from kvasir.engine.scheduler import Scheduler
from kvasir.log import get_logger

logger = get_logger(__name__)
_TRIES = 3  # at the smallest size
_PATIENCE = 64  # steps that must go well before steps grow again; twice as many after every failure ...
_MOST_PATIENCE = 1 << 14  # ... up to so many


class StepSize:
    """A step that fails is tried again at the same size first: its memory was released, and others may have given back
    theirs. After that steps are half as large, and double whenever enough of them went well."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.limits.max_num_batched_tokens
        self._enough = min(self._full, scheduler.limits.max_num_seqs)  # less is the last resort: some rows would wait
        self._is_calm = True  # steps are of full size, and the last failure is long ago
        self._failures = 0  # at this size
        self._good_steps = 0
        self._patience = _PATIENCE

    def failed(self, num_tokens: int) -> bool:
        """A step of so many tokens did not fit. False if there is nothing left to try."""
        self._is_calm = False
        self._failures += 1
        self._good_steps = 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        limit, smaller = self._scheduler.limits.max_num_batched_tokens, max(num_tokens // 2, 1)
        if limit > self._enough:
            smaller = max(smaller, self._enough)
        if self._failures > 1 and smaller < limit and self._scheduler.limits.chunked_prefill:
            self._scheduler.limit_steps(smaller)
            self._failures = 1  # none of this size; if one fails, the next is smaller at once
        logger.warning(
            "a step of %d tokens did not fit the device's memory: all requests are computed anew, in steps of at most "
            "%d for now. To avoid this, lower gpu_memory_utilization or max_num_batched_tokens.",
            num_tokens, self._scheduler.limits.max_num_batched_tokens,
        )  # fmt: skip
        return self._failures < _TRIES

    def fitted(self) -> None:
        """A step went well."""
        if self._is_calm:
            return
        self._good_steps += 1
        if self._good_steps >= self._patience:
            self._good_steps = self._failures = 0
            limit = self._scheduler.limits.max_num_batched_tokens
            self._is_calm = limit == self._full
            self._scheduler.limit_steps(min(2 * limit, self._full))
