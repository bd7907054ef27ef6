"""How fast the engine has been lately: what estimates of a request's time rest on. Core process."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_LATELY = 256  # steps and requests that are remembered
_FEWEST = 16  # of them, before anything is said
_REFRESH = 32  # steps after which figures are made anew
_FAST = 0.1  # the share of steps that may have been quicker than what is called quick


class Pace:
    """Durations of steps and of requests. Noting a step costs less than a microsecond."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._steps: deque[tuple[float, float, int, bool]] = deque(maxlen=_LATELY)  # planned, ended, tokens, full
        self._figures = 0.0, 0.0, 0.0
        self._next_figures = 0  # the step after which they are made anew
        self._ends: deque[float] = deque(maxlen=_LATELY)  # when requests ended
        self._services: deque[tuple[float, bool]] = deque(maxlen=_LATELY)
        # of the services, how long they took, and the share that takes longer; None: to be made anew
        self._unlikely: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def note_step(self, planned: float, now: float, num_tokens: int, is_full: bool) -> None:
        """A result came."""
        self.num_steps += 1
        self._steps.append((planned, now, num_tokens, is_full))

    def note_service(self, now: float, started: float, is_done: bool) -> None:
        """A request that began to run at `started` is done, or has run out of time."""
        self._services.append((now - started, is_done))
        self._unlikely = None
        if is_done:
            self._ends.append(now)

    # ------------------------------------------------------------ estimates

    def least_seconds(self, num_tokens: int, num_generated: int) -> float:
        """What it takes at least to compute so many tokens, the last of which gives the first of `num_generated`."""
        quick, per_token, _ = self._look_back()
        return max(num_tokens * per_token, quick) + (num_generated - 1) * quick

    def usual_seconds(self, num_tokens: int, num_generated: int) -> float:
        """What it takes in steps that are as long as most."""
        _, per_token, mean = self._look_back()
        return num_tokens * per_token + num_generated * mean

    def chance(self, seconds: float) -> float:
        """The share of requests that take no longer than that from their start. It is Kaplan and Meier's estimate, in
        which one that ran out of time counts for as long as it ran."""
        if len(self._services) < _FEWEST:
            return 1.0
        if self._unlikely is None:
            lasted, is_done = np.array(sorted(self._services)).T
            still_there = np.arange(len(lasted), 0, -1)
            self._unlikely = lasted, np.cumprod(1 - is_done / still_there)
        lasted, longer = self._unlikely
        place = int(np.searchsorted(lasted, seconds, "right"))
        return 1.0 - float(longer[place - 1]) if place else 0.0

    def ends_per_second(self, now: float) -> float | None:
        """How many requests were done per second lately, None if too few were."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return len(self._ends) / (now - self._ends[0])

    def _look_back(self) -> tuple[float, float, float]:
        """Seconds of a quick step, per token of a quick full step, and of steps on average; 0: too few were seen."""
        if self.num_steps >= self._next_figures or not self._figures[0]:
            self._next_figures = self.num_steps + _REFRESH
            planned, ended, num_tokens, is_full = np.array(self._steps or [(0.0,) * 4]).T
            # the device began a step when it was planned, or when the one before was done
            seconds = ended[1:] - np.maximum(planned[1:], ended[:-1])
            per_token = (seconds / num_tokens[1:])[is_full[1:] > 0]
            mean = float(seconds.mean()) if len(seconds) >= _FEWEST else 0.0
            self._figures = _low(seconds), _low(per_token), mean
        return self._figures


def _low(seen: NDArray[np.float64]) -> float:
    return float(np.quantile(seen, _FAST)) if len(seen) >= _FEWEST else 0.0
