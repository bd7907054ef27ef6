"""The lowest priority value first, as in vLLM; waiting may raise a request, up to a bound."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.engine.policies.base import Context, Policy
from kvasir.engine.policies.heap import Heap
from kvasir.engine.request import Request


class Priority(Policy):
    """A request waits for those of a lower value and those of its own that came before it. Those may starve it: that is
    what priorities are for.

    With aging (`aging_seconds` A, `aging_levels` L) a request's value sinks by one for every A seconds since it came,
    by at most L. Then one of value p stands before all that came more than (p - q) * A seconds after it with a value
    q >= p - L: where values differ by no more than L, nobody starves.
    """

    # Among requests that still rise, the order is that of value * A + arrival, which does not change; among those that
    # have risen all they can, that of the values. So both are heaps, and only their heads are compared.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._period = self.context.aging_seconds
        self._levels = self.context.aging_levels if self._period else 0
        self._rising = Heap(lambda request: request.spec.terms.priority * self._period + request.arrival)
        self._rising_by_age = Heap(lambda request: request.arrival)
        self._risen = Heap(lambda request: (request.spec.terms.priority, request.arrival))

    def __len__(self) -> int:
        return len(self._rising) + len(self._risen)

    def __iter__(self) -> Iterator[Request]:
        now = self.context.clock()
        return iter(sorted([*self._rising, *self._risen], key=lambda request: self._rank(request, now)))

    def add(self, request: Request) -> None:
        if self._levels:
            self._rising.add(request)
            self._rising_by_age.add(request)
        else:
            self._risen.add(request)

    def peek(self) -> Request:
        now = self.context.clock()
        while len(self._rising_by_age):
            oldest = self._rising_by_age.peek()
            if now - oldest.arrival < self._levels * self._period:
                break
            self.remove(oldest)
            self._risen.add(oldest)
        heads = [heap.peek() for heap in (self._rising, self._risen) if len(heap)]
        return min(heads, key=lambda request: self._rank(request, now))

    def remove(self, request: Request) -> None:
        if request in self._risen:
            self._risen.remove(request)
        else:
            self._rising.remove(request)
            self._rising_by_age.remove(request)

    def victim(self, running: list[Request]) -> Request:
        now = self.context.clock()
        return max(running, key=lambda request: self._rank(request, now))

    def _rank(self, request: Request, now: float) -> tuple[float, float, int, int]:
        raised = min(self._levels, max(0.0, now - request.arrival) / self._period) if self._levels else 0.0
        return request.spec.terms.priority - raised, request.arrival, request.seq, request.key
