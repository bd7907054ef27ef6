"""Ends requests whose deadline has passed, or cannot be met any more where the policy says so. Core process.

Between two steps it costs one look at the clock, however many requests there are.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from kvasir.engine.request_groups import Families
from kvasir.engine.scheduler import Scheduler
from kvasir.messages import EngineRequest, Finished, FinishReason

_SLACK = 256  # so many requests that ended in time may be remembered


class Overdue:
    def __init__(self, scheduler: Scheduler, families: Families) -> None:
        self._scheduler = scheduler
        self._families = families
        self._heap: list[tuple[float, int, float, bool]] = []  # deadline, key, arrival, whether tokens are streamed
        self.num_given_up = 0  # ended before their deadline

    def watch(self, request: EngineRequest) -> None:
        """End this request, and those that fork from it, at their deadlines."""
        for each in (request, *request.forks):
            if each.terms.deadline is not None:
                heappush(self._heap, (each.terms.deadline, each.key, each.terms.arrival, each.stream))
        if len(self._heap) > 2 * (len(self._scheduler) + self._families.num_known) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._scheduler or entry[1] in self._families]
            heapify(self._heap)

    def end(self) -> list[Finished]:
        """The last words of requests that end now."""
        ended: list[Finished] = []
        now = self._scheduler.context.clock()
        while self._heap and self._heap[0][0] <= now:
            deadline, key, arrival, stream = heappop(self._heap)
            where = "while it ran" if self._is_running(key) else "while it waited"
            allowed = round(deadline - arrival, 6)  # to the microsecond: a large clock reading blurs what is below
            limit = f"of {allowed:.10g} s " if arrival else ""
            ended += self._end(key, stream, f"its deadline {limit}passed {where}")
        if self._scheduler.waiting.gives_up:
            while (late := self._scheduler.waiting.hopeless()) is not None:
                request, why = late
                ended += self._end(request.key, request.spec.stream, why)
                self.num_given_up += 1
        return ended

    def _is_running(self, key: int) -> bool:
        return self._scheduler.num_computed(key) > 0 or self._families.beams.is_running(key)

    def _end(self, key: int, stream: bool, why: str) -> list[Finished]:
        """Its last word, unless it has ended before."""
        runs = self._is_running(key)
        if self._families.abort(key):
            self._scheduler.count_end(runs)
            tokens = None if stream else np.zeros(0, np.int32)
            return [Finished(key, FinishReason.TIMEOUT, None, tokens, why)]
        found = self._scheduler.end(key, FinishReason.TIMEOUT, why)
        return [] if found is None else [found]
