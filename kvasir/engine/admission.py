"""Limits of the queue: refuses a request for which there is no room. Core process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir.engine.scheduler import Scheduler
from kvasir.errors import OverloadedError
from kvasir.messages import EngineRequest

_MIN_RETRY, _MAX_RETRY = 1.0, 60.0  # seconds after which a client should try again


@dataclass(slots=True, frozen=True)
class QueueLimits:
    """Upper bounds of the queue; 0 means none."""

    max_requests: int = 0  # requests that wait while all rows are taken
    max_tokens: int = 0  # prompt tokens of waiting requests


class Admission:
    """Checks every new request against the queue's limits."""

    def __init__(self, limits: QueueLimits, scheduler: Scheduler) -> None:
        self.limits = limits
        self.num_refused = 0
        self._scheduler = scheduler

    def check(self, request: EngineRequest, num_others: int) -> None:
        """Refuse a request for which the queue has no room. `num_others` requests wait outside the scheduler."""
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
        """Whole seconds until half of the waiting requests are served, at the current rate."""
        context = self._scheduler.context
        rate = context.service_rate.ends_per_second(context.clock())
        return float(math.ceil(min(max(waiting / 2 / rate, _MIN_RETRY), _MAX_RETRY))) if rate else _MIN_RETRY
