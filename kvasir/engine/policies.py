"""Queue policies: who is admitted next, and who gives way when blocks run out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvasir.engine.request import Request


class Policy(Protocol):
    """The waiting requests, in the order this policy wants them."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def add(self, request: Request) -> None:
        """A new request arrives."""

    def put_back(self, request: Request) -> None:
        """A preempted request waits again, ahead of those that never ran."""

    def peek(self) -> Request:
        """Who is next. Only called while somebody waits."""

    def remove(self, request: Request) -> None:
        """It was admitted or aborted."""

    def victim(self, running: list[Request]) -> Request:
        """Who of `running` (first admitted first, never empty) gives way."""


class FirstComeFirstServed:
    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def add(self, request: Request) -> None:
        self._waiting[request.key] = request

    def put_back(self, request: Request) -> None:
        self._waiting[request.key] = request
        self._waiting.move_to_end(request.key, last=False)
        if not request.spec.picked:  # those whose tokens are picked wait for each other: nobody may stand before one
            for key in [key for key, other in self._waiting.items() if other.spec.picked][::-1]:
                self._waiting.move_to_end(key, last=False)

    def peek(self) -> Request:
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.key]

    def victim(self, running: list[Request]) -> Request:
        return running[-1]


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed}
