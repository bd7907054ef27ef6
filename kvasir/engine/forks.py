"""Requests that share another's prompt: they wait until it is computed, then start on its blocks. Core process."""

from __future__ import annotations

from kvasir.engine.scheduler import Scheduler
from kvasir.messages import EngineRequest


class Forks:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[int, list[EngineRequest]] = {}  # by the key of the request they fork from
        self._parents: dict[int, int] = {}  # that key, by a fork's own

    def __len__(self) -> int:
        """Requests that others wait for."""
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._parents

    @property
    def num_waiting(self) -> int:
        return len(self._parents)

    def expect(self, request: EngineRequest) -> None:
        if request.forks:
            self._waiting[request.key] = list(request.forks)
            self._parents |= dict.fromkeys((fork.key for fork in request.forks), request.key)

    def start(self) -> None:
        """Fork from requests whose prompt is planned by now: the device gets to it before the forks' first step."""
        ready = [key for key, forks in self._waiting.items() if self._scheduler.num_computed(key) >= _length(forks)]
        for key in ready:
            for fork in self._take(key):
                self._scheduler.fork(key, fork)

    def abort(self, key: int) -> bool:
        """Forget a fork that has not started. If what it waits for is aborted, the others go on by themselves."""
        for fork in self._take(key):
            self._scheduler.add(fork)
        parent = self._parents.pop(key, None)
        if parent is None:
            return False
        self._waiting[parent] = [fork for fork in self._waiting[parent] if fork.key != key]
        return True

    def _take(self, parent: int) -> list[EngineRequest]:
        """Those that wait for it, and no longer do."""
        forks = self._waiting.pop(parent, [])
        for fork in forks:
            del self._parents[fork.key]
        return forks


def _length(forks: list[EngineRequest]) -> int:
    return max((len(fork.prompt_token_ids) for fork in forks), default=0)
