"""Observers of the engine's steps: they measure and record, and change nothing. Core process.

The core calls every observer at three moments. A new one is a class here or in its feature's file, added to
`EngineCore.observers`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvasir.engine.scheduler import Scheduler
from kvasir.messages import GraphUse, StepPlan, StepResult


class StepObserver(Protocol):
    """What the core calls around a step. Each call should take a microsecond or less."""

    def planned(self, plan: StepPlan) -> None:
        """A step was planned and is about to be launched."""

    def finished(self, result: StepResult) -> None:
        """The result of the oldest step in flight came in."""

    def restarted(self) -> None:
        """The steps in flight were dropped: no result of theirs will come."""


class StepTimer:
    """Records the duration of every step in the service rate, on which estimates for deadlines rest."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[tuple[float, int]] = deque()  # time of planning, tokens

    def planned(self, plan: StepPlan) -> None:
        self._in_flight.append((self._scheduler.context.clock(), plan.total_tokens))

    def finished(self, result: StepResult) -> None:
        planned, num_tokens = self._in_flight.popleft()
        context, limits = self._scheduler.context, self._scheduler.limits
        is_full = 2 * num_tokens >= limits.max_num_batched_tokens
        context.service_rate.record_step(planned, context.clock(), num_tokens, is_full)

    def restarted(self) -> None:
        self._in_flight.clear()


class GraphCounter:
    """Keeps what the worker last said about its CUDA graphs."""

    def __init__(self) -> None:
        self.use = GraphUse()

    def planned(self, plan: StepPlan) -> None:
        pass

    def finished(self, result: StepResult) -> None:
        self.use = result.graphs or self.use

    def restarted(self) -> None:
        pass
