"""Ends requests whose deadline has passed, or cannot be met any more where the policy says so. Core process.

It costs one look at the clock per step, however many requests there are.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from kvasir.engine.request_groups import RequestGroups
from kvasir.engine.scheduler import Scheduler
from kvasir.messages import EngineRequest, Finished, FinishReason

_MAX_STALE = 256  # entries of requests that have ended which may stay in the heap


class DeadlineMonitor:
    """Deadlines of all requests, running or waiting."""

    def __init__(self, scheduler: Scheduler, groups: RequestGroups) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._heap: list[tuple[float, int, float, bool]] = []  # deadline, key, arrival, whether tokens are streamed
        self.num_foreseen = 0  # requests ended before their deadline

    def add(self, request: EngineRequest) -> None:
        """Note the deadlines of a request and of its forks."""
        for each in (request, *request.forks):
            if each.terms.deadline is not None:
                heappush(self._heap, (each.terms.deadline, each.key, each.terms.arrival, each.stream))
        if len(self._heap) > 2 * (len(self._scheduler) + self._groups.num_known) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[1] in self._scheduler or entry[1] in self._groups]
            heapify(self._heap)

    def expire(self) -> list[Finished]:
        """End the requests that are out of time, and return their Finished messages."""
        ended: list[Finished] = []
        now = self._scheduler.context.clock()
        while self._heap and self._heap[0][0] <= now:
            deadline, key, arrival, stream = heappop(self._heap)
            where = "while it ran" if self._is_running(key) else "while it waited"
            allowed = round(deadline - arrival, 6)  # to the microsecond: a large clock reading blurs what is below
            limit = f"of {allowed:.10g} s " if arrival else ""
            ended += self._end(key, stream, f"its deadline {limit}passed {where}")
        if self._scheduler.waiting.ends_early:
            while (late := self._scheduler.waiting.find_unreachable()) is not None:
                request, why = late
                ended += self._end(request.key, request.spec.stream, why)
                self.num_foreseen += 1
        return ended

    def _is_running(self, key: int) -> bool:
        return self._scheduler.num_computed(key) > 0 or self._groups.beams.is_running(key)

    def _end(self, key: int, stream: bool, why: str) -> list[Finished]:
        """End one request. Empty if it has ended before."""
        runs = self._is_running(key)
        if self._groups.abort(key):
            self._scheduler.count_timeout(runs)
            tokens = None if stream else np.zeros(0, np.int32)
            return [Finished(key, FinishReason.TIMEOUT, None, tokens, why)]
        found = self._scheduler.end(key, FinishReason.TIMEOUT, why)
        return [] if found is None else [found]
