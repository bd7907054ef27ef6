"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvasir.engine.policies.base import Context, Policy
from kvasir.engine.request import Request


class FirstComeFirstServed(Policy):
    """Admits requests in order of arrival and preempts the latest one, so no request starves and the oldest is never
    preempted."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
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

    def peek(self) -> Request:
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.key]

    def select_to_preempt(self, running: list[Request]) -> Request:
        return running[-1]
