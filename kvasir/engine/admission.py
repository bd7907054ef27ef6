"""Whether one more request may wait. Core process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir.engine.scheduler import Scheduler
from kvasir.errors import OverloadedError
from kvasir.messages import EngineRequest

_SOONEST, _LATEST = 1.0, 60.0  # seconds after which to try again


@dataclass(slots=True, frozen=True)
class QueueLimits:
    """0: no limit."""

    max_requests: int = 0  # that wait although all rows are taken
    max_tokens: int = 0  # of prompts that wait


class Admission:
    def __init__(self, limits: QueueLimits, scheduler: Scheduler) -> None:
        self.limits = limits
        self.num_refused = 0
        self._scheduler = scheduler

    def check(self, request: EngineRequest, num_others: int) -> None:
        """Refuse a request for which the queue has no room. `num_others`: requests that wait outside the scheduler."""
        queue, limits = self._scheduler.waiting, self.limits
        waiting = len(queue) + num_others
        if limits.max_requests and waiting >= limits.max_requests + self._scheduler.rows.num_free:
            self._refuse(f"{waiting} requests wait, and max_queued_requests={limits.max_requests}", waiting)
        tokens = queue.num_prompt_tokens + len(request.prompt_token_ids)
        if limits.max_tokens and waiting and tokens > limits.max_tokens:
            self._refuse(
                f"with this one, prompts of {tokens} tokens would wait, and max_queued_tokens={limits.max_tokens}",
                waiting,
            )

    def _refuse(self, what: str, waiting: int) -> None:
        self.num_refused += 1
        seconds = self._retry_after(waiting)
        raise OverloadedError(f"the queue is full: {what}; try again in {seconds:.0f} s", seconds)

    def _retry_after(self, waiting: int) -> float:
        """Whole seconds until, at the pace of late, half of those that wait are served."""
        context = self._scheduler.context
        rate = context.pace.ends_per_second(context.clock())
        return float(math.ceil(min(max(waiting / 2 / rate, _SOONEST), _LATEST))) if rate else _SOONEST
