"""Earliest deadline first, without the requests that cannot make theirs."""

from __future__ import annotations

from collections import deque

from kvasir.engine.policies.base import Context, Ranked
from kvasir.engine.request import Request


class EarliestDeadlineFirst(Ranked):
    """Who must be done first goes first; the latest deadline gives way. A request without a deadline is ordered as if
    it had to be done `default_deadline` seconds after it came, and is not ended then.

    Nobody who comes after a request's deadline stands before it, so a request waits for at most those that came until
    then: it has run, or has been ended with a timeout, by its deadline; one without has only so many before it.

    A waiting request that cannot be done in time any more is ended at once, and makes room for one that can. It is
    looked at when it comes and whenever it is next. What it takes is counted low: only tokens that are not cached,
    computed at the best pace of full steps seen lately, and the fewest it may generate, each in the quickest step seen
    lately. As long as too few steps were seen, nobody is ended early.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._new: deque[Request] = deque()

    def rank(self, request: Request) -> tuple[float, float]:
        deadline = request.spec.terms.deadline
        return request.arrival + self.context.default_deadline if deadline is None else deadline, request.arrival

    def add(self, request: Request) -> None:
        super().add(request)
        self._new.append(request)

    def hopeless(self) -> tuple[Request, str] | None:
        while self._new:
            request = self._new.popleft()
            if request in self._waiting and (why := self._why_late(request)) is not None:
                return request, why
        if not len(self):
            return None
        request = self.peek()
        why = self._why_late(request)
        return None if why is None else (request, why)

    def _why_late(self, request: Request) -> str | None:
        deadline, pace = request.spec.terms.deadline, self.context.pace
        if deadline is None or request.spec.picked:  # beams are ended with their search
            return None
        left = deadline - self.context.clock()
        generated = len(request.token_ids) - request.num_prompt_tokens
        to_generate = max(1, request.spec.least_tokens - generated)
        if pace.least_seconds(len(request.token_ids), to_generate) <= left:
            return None
        needed = pace.least_seconds(self.context.tokens_to_compute(request), to_generate)
        if needed <= left:
            return None
        return f"its deadline is {max(left, 0.0):.3g} s away and it needs at least {needed:.3g} s at the present pace"
