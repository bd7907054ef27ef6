"""Earliest deadline first, without the requests that cannot make theirs."""

from __future__ import annotations

from collections import deque

from kvasir.engine.policies.base import Context, Ranked
from kvasir.engine.request import Request

_LOOKED_AT = 8  # of those that are next; seldom are more let in by one step


class EarliestDeadlineFirst(Ranked):
    """Who must be done first goes first; the latest deadline gives way. A request without a deadline is ordered as if
    it had to be done `default_deadline` seconds after it came, and is not ended then.

    Nobody who comes after a request's deadline stands before it, so a request waits for at most those that came until
    then: it has run, or has been ended with a timeout, by its deadline; one without has only so many before it.

    A waiting request is ended early, to leave its time to one that can be done, in two cases. When it comes and when it
    is among the next: if it cannot be done in time even in the quickest steps seen lately, with the fewest tokens it
    may generate and nothing to compute that is cached. And when it is among the next and had to wait, as others do: if
    it may generate more than there is time for, and of the requests served lately fewer than `least_chance` took no
    longer than it has left. Without that second rule a flood leaves none to run but those that are about to fail. As
    long as little was seen, nobody is ended early.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._new: deque[Request] = deque()
        self._came: dict[int, int] = {}  # by key: at which step

    def rank(self, request: Request) -> tuple[float, float]:
        deadline = request.spec.terms.deadline
        return request.arrival + self.context.default_deadline if deadline is None else deadline, request.arrival

    def add(self, request: Request) -> None:
        super().add(request)
        self._new.append(request)
        self._came[request.key] = self.context.service_rate.num_steps

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._came[request.key]

    def hopeless(self) -> tuple[Request, str] | None:
        while self._new:
            request = self._new.popleft()
            if request in self._waiting and (why := self._why_late(request, False)) is not None:
                return request, why
        for request in self._waiting.first(_LOOKED_AT):
            has_to_wait = len(self) > 1 and self.context.service_rate.num_steps > self._came[request.key] + 1
            if (why := self._why_late(request, has_to_wait)) is not None:
                return request, why
        return None

    def _why_late(self, request: Request, has_to_wait: bool) -> str | None:
        spec, rate = request.spec, self.context.service_rate
        if spec.terms.deadline is None or spec.awaited:  # beams end with their search
            return None
        left = spec.terms.deadline - self.context.clock()
        generated = len(request.token_ids) - request.num_prompt_tokens
        if rate.usual_seconds(len(request.token_ids), spec.max_tokens - generated) <= left:
            return None
        to_compute = self.context.tokens_to_compute(request)
        needed = rate.least_seconds(to_compute, max(1, spec.least_tokens - generated))
        if needed > left:
            return f"its deadline is {max(left, 0.0):.3g} s away and it needs at least {needed:.3g} s"
        chance = rate.chance(left) if has_to_wait else 1.0
        if chance < self.context.least_chance and rate.usual_seconds(to_compute, spec.max_tokens - generated) > left:
            return f"its deadline is {left:.3g} s away, and of the latest requests {chance:.0%} were done as quickly"
        return None
