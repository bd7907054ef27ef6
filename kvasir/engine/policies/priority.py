"""The lowest priority value first, as in vLLM; waiting may raise a request, up to a bound."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.engine.policies.base import Context, Heap, Policy
from kvasir.engine.request import Request


class Priority(Policy):
    """A request waits for those of a lower value, and for those of its own that came before it. Without aging a flood
    of better ones starves it: that is what priorities are for.

    With aging (`aging_seconds` A, `aging_best` b) the value of a request sinks by one for every A seconds since it
    came, down to b and no further; values of b and less do not change. So a request of value p > b waits for those
    below b, for those of value q >= b that came less than (p - q) * A seconds after it, and for nobody else: as long as
    those below b leave room, nobody starves.
    """

    # All that rise reach b in the order of value * A + arrival, which does not change while they wait. Those that are
    # there, or never rise, stand in the order of their value and arrival, before all that still rise.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._period = self.context.aging_seconds
        self._best = self.context.aging_best if self._period else float("inf")
        self._rising = Heap(self._at_best)
        self._risen = Heap(lambda request: (min(request.spec.terms.priority, self._best), request.arrival))

    def __len__(self) -> int:
        return len(self._rising) + len(self._risen)

    def __iter__(self) -> Iterator[Request]:
        now = self.context.clock()
        return iter(sorted([*self._rising, *self._risen], key=lambda request: self._rank(request, now)))

    def add(self, request: Request) -> None:
        rises = request.spec.terms.priority > self._best
        (self._rising if rises else self._risen).add(request)

    def peek(self) -> Request:
        now = self.context.clock()
        while len(self._rising) and self._at_best(self._rising.peek()) <= now:
            raised = self._rising.peek()
            self._rising.remove(raised)
            self._risen.add(raised)
        return self._risen.peek() if len(self._risen) else self._rising.peek()

    def remove(self, request: Request) -> None:
        (self._risen if request in self._risen else self._rising).remove(request)

    def victim(self, running: list[Request]) -> Request:
        now = self.context.clock()
        return max(running, key=lambda request: self._rank(request, now))

    def _at_best(self, request: Request) -> float:
        """When it will have risen all it can."""
        return request.arrival + (request.spec.terms.priority - self._best) * self._period

    def _rank(self, request: Request, now: float) -> tuple[float, float, int, int]:
        value: float = request.spec.terms.priority
        if value > self._best:
            value = self._best + max(0.0, self._at_best(request) - now) / self._period
        return value, request.arrival, request.seq, request.key
