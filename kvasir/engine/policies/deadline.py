"""Earliest deadline first; requests that cannot meet their deadline are ended early."""

from __future__ import annotations

from collections import deque

from kvasir.engine.policies.base import Context, RankedPolicy
from kvasir.engine.request import Request

_NUM_CHECKED = 8  # next requests that are checked in every step; a step seldom admits more


class EarliestDeadlineFirst(RankedPolicy):
    """Admits the request with the earliest deadline and preempts the one with the latest. A request without a deadline
    is ordered as if its deadline were `default_deadline` seconds after its arrival, but it is not ended then.

    No request starves: requests that arrive after a request's deadline (or default deadline) are ordered behind it.

    A waiting request is ended early, so that others can use its time, in two cases:
    - It certainly misses its deadline: it would even in the fastest recent steps, with the fewest tokens that it may
      generate, and with cached tokens not recomputed. This is checked on arrival and when it is one of the next.
    - It probably misses its deadline: it is one of the next, it had to wait and others wait too, it may generate more
      tokens than there is time for, and fewer than `least_chance` of the recent requests were as fast as it would have
      to be. Without this rule an overloaded engine would only run requests that are about to time out.
    No request is ended early before enough steps and requests were measured.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._new: deque[Request] = deque()  # not checked yet
        self._arrival_step: dict[int, int] = {}  # by key

    def rank(self, request: Request) -> tuple[float, float]:
        deadline = request.spec.terms.deadline
        return request.arrival + self.context.default_deadline if deadline is None else deadline, request.arrival

    def add(self, request: Request) -> None:
        super().add(request)
        self._new.append(request)
        self._arrival_step[request.key] = self.context.service_rate.num_steps

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._arrival_step[request.key]

    def find_unreachable(self) -> tuple[Request, str] | None:
        while self._new:
            request = self._new.popleft()
            if request in self._waiting and (reason := self._late_reason(request, False)) is not None:
                return request, reason
        for request in self._waiting.first(_NUM_CHECKED):
            had_to_wait = len(self) > 1 and self.context.service_rate.num_steps > self._arrival_step[request.key] + 1
            if (reason := self._late_reason(request, had_to_wait)) is not None:
                return request, reason
        return None

    def _late_reason(self, request: Request, had_to_wait: bool) -> str | None:
        """Return why the request will miss its deadline; None if it may meet it."""
        spec, rate = request.spec, self.context.service_rate
        if spec.terms.deadline is None or spec.awaited:  # a beam ends with its search, not by itself
            return None
        left = spec.terms.deadline - self.context.clock()
        generated = len(request.token_ids) - request.num_prompt_tokens
        if rate.usual_seconds(len(request.token_ids), spec.max_tokens - generated) <= left:
            return None
        to_compute = self.context.tokens_to_compute(request)
        needed = rate.least_seconds(to_compute, max(1, spec.min_tokens - generated))
        if needed > left:
            return f"its deadline is {max(left, 0.0):.3g} s away and it needs at least {needed:.3g} s"
        chance = rate.chance(left) if had_to_wait else 1.0
        if chance < self.context.least_chance and rate.usual_seconds(to_compute, spec.max_tokens - generated) > left:
            return f"its deadline is {left:.3g} s away, and only {chance:.0%} of recent requests were that fast"
        return None
