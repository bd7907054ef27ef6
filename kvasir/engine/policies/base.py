"""Queue policies: they order waiting requests and select which running request to preempt when blocks run out.

Core process. A policy sees requests and their scheduling parameters, never rows, blocks or token contents. The queue
around it (engine/queue.py) counts tokens and handles requests that others wait for.
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

from kvasir.engine.observers import ServiceRate
from kvasir.engine.request import Request


def _whole_prompt(request: Request) -> int:
    return len(request.token_ids)


@dataclass(slots=True)
class Context:
    """Clock, measurements and settings for a policy. A scheduler and its policy share one."""

    clock: Callable[[], float] = time.monotonic
    service_rate: ServiceRate = field(default_factory=ServiceRate)
    # number of tokens to compute before a waiting request's next token; the scheduler knows which are cached
    tokens_to_compute: Callable[[Request], int] = _whole_prompt
    aging_seconds: float = 0.0  # waiting time that lowers a request's priority value by one; 0: no aging
    aging_best: int = 0  # lowest priority value that a request can reach by aging
    default_deadline: float = 60.0  # seconds after arrival by which requests without a deadline are ordered
    least_chance: float = 0.5  # a waiting request with a lower chance to meet its deadline is ended early


class Policy(ABC):
    """Holds the waiting requests and orders them. Users derive their own policies from this class."""

    def __init__(self, context: Context | None = None) -> None:
        self.context = context or Context()

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, next one first."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a new request."""

    def put_back(self, request: Request) -> None:
        """Queue a preempted request again."""
        self.add(request)

    @abstractmethod
    def peek(self) -> Request:
        """Return the request to admit next. Only called while requests wait."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a request that was admitted, aborted or ended."""

    @abstractmethod
    def select_to_preempt(self, running: list[Request]) -> Request:
        """Return the request of `running` to preempt. The list is in order of admission and never empty."""

    def find_unreachable(self) -> tuple[Request, str] | None:
        """Return a waiting request that cannot meet its deadline, and the reason. The caller ends it with a timeout
        and calls again until the answer is None."""
        return None


class TokenCountingPolicy(Policy):
    """A policy that needs the number of tokens computed for each account, for example a tenant. The queue reports them
    only when requests are admitted or leave, so other steps cost nothing."""

    @abstractmethod
    def account(self, request: Request) -> int:
        """Return the number of the account that the request's tokens are added to; a small integer."""

    @abstractmethod
    def join(self, request: Request, num_tokens: int) -> None:
        """A request was admitted with `num_tokens` known tokens to compute; `count` does not report these again."""

    @abstractmethod
    def count(self, tokens: NDArray[np.float64]) -> None:
        """Add the tokens computed since the last call; `tokens` is indexed by account."""

    @abstractmethod
    def leave(self, request: Request) -> None:
        """A request stopped running. All its tokens have been counted."""


class RankedPolicy(Policy):
    """A policy defined by a rank per request, a number or a tuple. The lowest rank is admitted first, the highest is
    preempted first; requests of equal rank keep their order of arrival. A waiting request's rank must not change."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._waiting = RequestHeap(self.rank)

    @abstractmethod
    def rank(self, request: Request) -> Any:
        """Return the request's rank, a number or a tuple; lower goes first."""

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

    def select_to_preempt(self, running: list[Request]) -> Request:
        return max(running, key=lambda request: (self.rank(request), request.seq, request.key))


# ----------------------------------------------------------------
# A heap of waiting requests whose ranks do not change.

_MAX_STALE = 64  # entries of removed requests that may stay in the heap beyond the number of live ones


class RequestHeap:
    """Waiting requests by rank, then by arrival. Entries of removed requests are dropped later."""

    def __init__(self, rank: Callable[[Request], Any]) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, Request]] = []  # rank, order of arrival, number of the entry, request
        self._entry: dict[int, int] = {}  # by request key: number of its valid entry
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, _, request in sorted(filter(self._is_valid, self._heap)))

    def __contains__(self, request: Request) -> bool:
        return request.key in self._entry

    def add(self, request: Request) -> None:
        number = self._entry[request.key] = next(self._numbers)
        heappush(self._heap, (self._rank(request), request.seq, number, request))

    def peek(self) -> Request:
        while not self._is_valid(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3]

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests, or all if there are fewer."""
        taken: list[tuple[Any, int, int, Request]] = []
        while len(taken) < min(count, len(self._entry)):
            self.peek()
            taken.append(heappop(self._heap))
        for entry in taken:
            heappush(self._heap, entry)
        return [request for _, _, _, request in taken]

    def remove(self, request: Request) -> None:
        del self._entry[request.key]
        if len(self._heap) > 2 * len(self._entry) + _MAX_STALE:
            self._heap = list(filter(self._is_valid, self._heap))
            heapify(self._heap)

    def _is_valid(self, entry: tuple[Any, int, int, Request]) -> bool:
        return self._entry.get(entry[3].key) == entry[2]
