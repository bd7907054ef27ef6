"""Lowest priority value first, as in vLLM; with aging, waiting lowers a request's value down to a bound."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.engine.policies.base import Context, Policy, RequestHeap
from kvasir.engine.request import Request


class Priority(Policy):
    """Admits the request with the lowest value, and requests of equal value in order of arrival. It preempts in the
    reverse order. Without aging, enough requests of lower values starve a request.

    With aging (`aging_seconds` A, `aging_best` b), the value of a request falls by one for every A seconds since its
    arrival, down to b. Values of b or lower do not change. So a request of value p > b waits only for requests of
    values below b, and for those of value q >= b that arrived less than (p - q) * A seconds after it. No request
    starves as long as requests of values below b leave room.
    """

    # Requests that age reach b in the order of value * A + arrival, which is constant. Requests that have reached b,
    # or do not age, are ordered by value and arrival and go before all that still age.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._period = self.context.aging_seconds
        self._best = self.context.aging_best if self._period else float("inf")
        self._aging = RequestHeap(self._settles_at)
        self._settled = RequestHeap(lambda request: (min(request.spec.terms.priority, self._best), request.arrival))

    def __len__(self) -> int:
        return len(self._aging) + len(self._settled)

    def __iter__(self) -> Iterator[Request]:
        now = self.context.clock()
        return iter(sorted([*self._aging, *self._settled], key=lambda request: self._rank(request, now)))

    def add(self, request: Request) -> None:
        ages = request.spec.terms.priority > self._best
        (self._aging if ages else self._settled).add(request)

    def peek(self) -> Request:
        now = self.context.clock()
        while len(self._aging) and self._settles_at(self._aging.peek()) <= now:
            settled = self._aging.peek()
            self._aging.remove(settled)
            self._settled.add(settled)
        return self._settled.peek() if len(self._settled) else self._aging.peek()

    def remove(self, request: Request) -> None:
        (self._settled if request in self._settled else self._aging).remove(request)

    def select_to_preempt(self, running: list[Request]) -> Request:
        now = self.context.clock()
        return max(running, key=lambda request: self._rank(request, now))

    def _settles_at(self, request: Request) -> float:
        """Time at which the request's value reaches `aging_best`."""
        return request.arrival + (request.spec.terms.priority - self._best) * self._period

    def _rank(self, request: Request, now: float) -> tuple[float, float, int, int]:
        value: float = request.spec.terms.priority
        if value > self._best:
            value = self._best + max(0.0, self._settles_at(request) - now) / self._period
        return value, request.arrival, request.seq, request.key
