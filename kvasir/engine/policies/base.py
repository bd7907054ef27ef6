"""What a queue policy is: the order in which requests are admitted, and who gives way when blocks run out.

Core process. A policy sees requests and their terms, and never a row, a block or a token's content. The queue around
it (engine/queue.py) counts, and takes care of requests that others wait for; a policy need not.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.request import Request
from kvasir.engine.service_rate import ServiceRate


def _whole_prompt(request: Request) -> int:
    return len(request.token_ids)


@dataclass(slots=True)
class Context:
    """What a policy may look at. One is shared by a scheduler and its policy."""

    clock: Callable[[], float] = time.monotonic
    service_rate: ServiceRate = field(default_factory=ServiceRate)  # how fast the engine has been
    # how many tokens of a waiting request must be computed before its next one: the scheduler knows what is cached
    tokens_to_compute: Callable[[Request], int] = _whole_prompt
    aging_seconds: float = 0.0  # of waiting that raise a request by one level of priority; 0: none do
    aging_best: int = 0  # the value below which waiting brings nobody
    default_deadline: float = 60.0  # seconds; what orders requests without a deadline among those that have one
    least_chance: float = 0.5  # of being done in time, below which a request that has to wait is ended


class Policy(ABC):
    """The waiting requests, in the order this policy wants them. Also the base of policies that users write."""

    def __init__(self, context: Context | None = None) -> None:
        self.context = context or Context()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request arrives."""

    def put_back(self, request: Request) -> None:
        """A preempted request waits again."""
        self.add(request)

    @abstractmethod
    def peek(self) -> Request:
        """Who is next. Only called while somebody waits."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """It does not wait any more: it was admitted, aborted or ended."""

    @abstractmethod
    def victim(self, running: list[Request]) -> Request:
        """Who of `running` (first admitted first, never empty) gives way: the policy's last."""

    def hopeless(self) -> tuple[Request, str] | None:
        """A waiting request that should be ended with a timeout now, and why. Asked again until there is none."""
        return None


class Counting(Policy):
    """A policy that is told who is given how many tokens: at admissions and ends, so that other steps cost nothing."""

    @abstractmethod
    def account(self, request: Request) -> int:
        """A small number under which the request's tokens are counted."""

    @abstractmethod
    def join(self, request: Request, num_tokens: int) -> None:
        """It runs, and so many tokens that it brings have yet to be computed; `served` will not count them again."""

    @abstractmethod
    def served(self, tokens: NDArray[np.float64]) -> None:
        """Tokens that running requests were given since the last call, by account."""

    @abstractmethod
    def leave(self, request: Request) -> None:
        """It runs no more. What it was given has been told."""


class Ranked(Policy):
    """A policy that is one number, or a tuple of them: the least goes first, the greatest gives way. Among equals who
    came first goes first. A rank must not change while a request waits."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._waiting = Heap(self.rank)

    @abstractmethod
    def rank(self, request: Request) -> Any: ...

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.add(request)

    def peek(self) -> Request:
        return self._waiting.peek()

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=lambda request: (self.rank(request), request.seq, request.key))


# ----------------------------------------------------------------
# Waiting requests in the order of a number that stays the same while they wait.

_SLACK = 64  # so many entries of requests that are gone may lie around


class Heap:
    """The least rank first, then who came first. Removed requests leave entries behind that are dropped later."""

    def __init__(self, rank: Callable[[Request], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, Request]] = []  # rank, seq, number of the entry
        self._entry: dict[int, int] = {}  # by key: which entry counts
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, _, request in sorted(filter(self._counts, self._heap)))

    def __contains__(self, request: Request) -> bool:
        return request.key in self._entry

    def add(self, request: Request) -> None:
        number = self._entry[request.key] = next(self._numbers)
        heappush(self._heap, (self._rank(request), request.seq, number, request))

    def peek(self) -> Request:
        while not self._counts(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3]

    def first(self, count: int) -> list[Request]:
        """So many from the front, fewer if there are no more."""
        taken: list[tuple[Any, int, int, Request]] = []
        while len(taken) < min(count, len(self._entry)):
            self.peek()
            taken.append(heappop(self._heap))
        for entry in taken:
            heappush(self._heap, entry)
        return [request for _, _, _, request in taken]

    def remove(self, request: Request) -> None:
        del self._entry[request.key]
        if len(self._heap) > 2 * len(self._entry) + _SLACK:
            self._heap = list(filter(self._counts, self._heap))
            heapify(self._heap)

    def _counts(self, entry: tuple[Any, int, int, Request]) -> bool:
        return self._entry.get(entry[3].key) == entry[2]
