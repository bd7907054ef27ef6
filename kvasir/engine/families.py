"""Requests that stand for several: completions that share a prompt, and beam searches. Core process.

The loop adds requests here, says when a step was planned and hands outputs through; what becomes of them is told to the
scheduler as requests, forks and picks. With no such request around, nothing here runs.
"""

from __future__ import annotations

from kvasir.engine.beams import Beams
from kvasir.engine.forks import Forks
from kvasir.engine.scheduler import Scheduler
from kvasir.messages import EngineOutput, EngineRequest


class Families:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.forks = Forks(scheduler)
        self.beams = Beams(scheduler)

    def __len__(self) -> int:
        """Requests that need attention between steps."""
        return len(self.forks) + len(self.beams)

    def __contains__(self, key: int) -> bool:
        """Whether the request is known here, and not yet to the scheduler."""
        return key in self.forks or key in self.beams

    @property
    def num_known(self) -> int:
        """Of how many requests that holds."""
        return self.forks.num_waiting + len(self.beams)

    def add(self, request: EngineRequest) -> None:
        if request.beam is not None:
            self.beams.add(request)
        else:
            self._scheduler.add(request)
            self.forks.expect(request)

    def planned(self) -> None:
        """A step was planned."""
        self.forks.start()

    def update(self, output: EngineOutput) -> EngineOutput:
        return self.beams.update(output) if len(self.beams) else output

    def abort(self, key: int) -> bool:
        """False if the scheduler is to abort it."""
        return self.forks.abort(key) or self.beams.abort(key)
