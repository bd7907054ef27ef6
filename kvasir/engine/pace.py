"""How fast the engine has been lately: what estimates of a request's time rest on. Core process."""

from __future__ import annotations

from collections import deque

import numpy as np

_STEPS = 256  # remembered
_FEWEST = 16  # steps before anything is said
_REFRESH = 32  # steps after which figures are made anew
_FAST = 0.1  # the share of steps that may have been quicker than what is called quick


class Pace:
    """Durations of steps, and the rate of those that were full. Noting a step costs less than a microsecond."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._rates: deque[float] = deque(maxlen=_STEPS)
        self._ends: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        self._last = 0.0  # when the last result came
        self._since_figures = _REFRESH
        self._figures = 0.0, 0.0

    def note_step(self, planned: float, now: float, num_tokens: int, is_full: bool) -> None:
        """A result came. The device began the step when it was planned, or when the one before was done."""
        seconds = now - max(planned, self._last)
        self._last = now
        self._since_figures += 1
        self._steps.append(seconds)
        if is_full:
            self._rates.append(seconds / num_tokens)

    def note_ends(self, now: float, count: int) -> None:
        """So many requests ended."""
        self._ends.append((now, count))

    def least_seconds(self, num_tokens: int, num_generated: int) -> float:
        """What computing so many tokens takes at least, the last of them giving the first of `num_generated`."""
        step, per_token = self._quick()
        return max(num_tokens * per_token, step) + (num_generated - 1) * step

    def _quick(self) -> tuple[float, float]:
        """Seconds of a quick step, and per token of a quick full step; 0 where too few were seen."""
        if self._since_figures >= _REFRESH or not self._figures[0]:
            self._since_figures = 0
            self._figures = _low(self._steps), _low(self._rates)
        return self._figures

    def ends_per_second(self, now: float) -> float | None:
        """How many requests ended per second lately, None if too few did."""
        if len(self._ends) < 2 or now <= self._ends[0][0]:
            return None
        return sum(count for _, count in self._ends) / (now - self._ends[0][0])


def _low(seen: deque[float]) -> float:
    return float(np.quantile(np.array(seen), _FAST)) if len(seen) >= _FEWEST else 0.0
