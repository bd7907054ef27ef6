"""Observers of the engine's steps, and the service rate: they measure and record, and change nothing. Core process.

The core calls every observer at three moments. A new one is a class here or in its feature's file, added to
`EngineCore.observers`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import ExpertTokens, GraphUse, StepPlan, StepResult

if TYPE_CHECKING:
    from kvasir.engine.scheduler import Scheduler


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


class ExpertCounter:
    """Adds up what the worker counts of tokens by expert."""

    total: ExpertTokens | None = None  # None: nothing was counted

    def planned(self, plan: StepPlan) -> None:
        pass

    def finished(self, result: StepResult) -> None:
        if (new := result.experts) is not None:
            self.total = new if self.total is None else replace(new, counts=self.total.counts + new.counts)

    def restarted(self) -> None:
        pass

    def tokens(self) -> dict[int, dict[str, int]]:
        """Return the counts by layer and range of experts."""
        total = self.total or ExpertTokens((), (), np.zeros((0, 0), np.int64))
        rows = [dict(zip(total.ranges, row, strict=True)) for row in total.counts.tolist()]
        return dict(zip(total.layers, rows, strict=True))


# ------------------------------------------------------------ service rate

_WINDOW = 256  # steps and requests that are remembered
_MIN_SAMPLES = 16  # needed before an estimate is given
_REFRESH = 32  # steps after which the figures are computed again
_FAST_SHARE = 0.1  # the quantile of step durations that counts as fast


class ServiceRate:
    """Durations of recent steps and requests, for estimates of how long a request will take.

    Recording a step takes less than a microsecond.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._steps: deque[tuple[float, float, int, bool]] = deque(maxlen=_WINDOW)  # planned, ended, tokens, is it full
        self._figures = 0.0, 0.0, 0.0
        self._next_figures = 0  # the step after which they are computed again
        self._ends: deque[float] = deque(maxlen=_WINDOW)  # times at which requests ended
        self._durations: deque[tuple[float, bool]] = deque(maxlen=_WINDOW)  # of requests; whether they were completed
        # durations in order, and the share of requests that take longer than each; None: must be computed again
        self._survival: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def record_step(self, planned: float, now: float, num_tokens: int, is_full: bool) -> None:
        """Record a step whose result came now. Full steps show how fast the device computes a token."""
        self.num_steps += 1
        self._steps.append((planned, now, num_tokens, is_full))

    def record_request(self, now: float, started: float, is_done: bool) -> None:
        """Record a request that began to run at `started` and is complete, or has timed out."""
        self._durations.append((now - started, is_done))
        self._survival = None
        if is_done:
            self._ends.append(now)

    # ------------------------------------------------------------ estimates

    def least_seconds(self, num_tokens: int, num_generated: int) -> float:
        """Lower bound of the time to compute `num_tokens` and generate `num_generated`, from the fastest steps."""
        fast, per_token, _ = self._step_figures()
        return max(num_tokens * per_token, fast) + (num_generated - 1) * fast

    def usual_seconds(self, num_tokens: int, num_generated: int) -> float:
        """Time to compute `num_tokens` and generate `num_generated` in steps of average length."""
        _, per_token, mean = self._step_figures()
        return num_tokens * per_token + num_generated * mean

    def chance(self, seconds: float) -> float:
        """Share of requests that take no longer than `seconds` from their start. This is Kaplan and Meier's estimate:
        a request that timed out counts for as long as it ran."""
        if len(self._durations) < _MIN_SAMPLES:
            return 1.0
        if self._survival is None:
            lasted, is_done = np.array(sorted(self._durations)).T
            still_there = np.arange(len(lasted), 0, -1)
            self._survival = lasted, np.cumprod(1 - is_done / still_there)
        lasted, longer = self._survival
        place = int(np.searchsorted(lasted, seconds, "right"))
        return 1.0 - float(longer[place - 1]) if place else 0.0

    def ends_per_second(self, now: float) -> float | None:
        """Requests completed per second; None if too few were seen."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return len(self._ends) / (now - self._ends[0])

    def _step_figures(self) -> tuple[float, float, float]:
        """Seconds of a fast step, per token of a fast full step, and of an average step; 0: too few were seen."""
        if self.num_steps >= self._next_figures or not self._figures[0]:
            self._next_figures = self.num_steps + _REFRESH
            planned, ended, num_tokens, is_full = np.array(self._steps or [(0.0,) * 4]).T
            # the device began a step when it was planned, or when the one before was done
            seconds = ended[1:] - np.maximum(planned[1:], ended[:-1])
            per_token = (seconds / num_tokens[1:])[is_full[1:] > 0]
            mean = float(seconds.mean()) if len(seconds) >= _MIN_SAMPLES else 0.0
            self._figures = _low(seconds), _low(per_token), mean
        return self._figures


def _low(seen: NDArray[np.float64]) -> float:
    return float(np.quantile(seen, _FAST_SHARE)) if len(seen) >= _MIN_SAMPLES else 0.0
