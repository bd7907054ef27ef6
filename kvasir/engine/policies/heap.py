"""Waiting requests in the order of a number that stays the same while they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from kvasir.engine.request import Request

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
