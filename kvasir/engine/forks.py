"""Requests that share another's prompt: they wait until it is computed, then start on its blocks. Core process."""

from __future__ import annotations

from kvasir.engine.scheduler import Scheduler
from kvasir.messages import EngineRequest


class Forks:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[int, list[EngineRequest]] = {}  # by the key of the request they fork from

    def __len__(self) -> int:
        """Requests that others wait for."""
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return any(fork.key == key for forks in self._waiting.values() for fork in forks)

    def expect(self, request: EngineRequest) -> None:
        if request.forks:
            self._waiting[request.key] = list(request.forks)

    def start(self) -> None:
        """Fork from requests whose prompt is planned by now: the device gets to it before the forks' first step."""
        ready = [key for key, forks in self._waiting.items() if self._scheduler.num_computed(key) >= _length(forks)]
        for key in ready:
            for fork in self._waiting.pop(key):
                self._scheduler.fork(key, fork)

    def abort(self, key: int) -> bool:
        """Forget a fork that has not started. If what it waits for is aborted, the others go on by themselves."""
        for fork in self._waiting.pop(key, ()):
            self._scheduler.add(fork)
        for forks in self._waiting.values():
            for fork in forks:
                if fork.key == key:
                    forks.remove(fork)
                    return True
        return False


def _length(forks: list[EngineRequest]) -> int:
    return max((len(fork.prompt_token_ids) for fork in forks), default=0)
