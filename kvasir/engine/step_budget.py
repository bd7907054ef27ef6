"""How large steps are, and when they are planned. Core process.

StepBudget: how many tokens a step has, so that running requests do not wait long for their next token. It follows from
measured times of steps.
StepPacing: when the next step is planned, so that a request that comes meanwhile is part of it.
StepSize: smaller steps after the device ran out of memory, then larger ones again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvasir.log import get_logger
from kvasir.messages import StepPlan, StepResult

if TYPE_CHECKING:
    from kvasir.engine.scheduler import Scheduler

_DECODE_STEPS = 2.7  # time of a step with prompt tokens, in steps of single tokens
_LONGEST = 0.1  # seconds of any step with prompt tokens
_DRAINING = 4  # steps in which waiting prompts should be computed before steps grow
_NEARLY = 0.9  # of the best throughput is good enough
_WAITED = 0.75  # share of a step's time after which the next one is planned ...
_PLANNING = 1e-3  # ... less these seconds, for planning and launching it
logger = get_logger(__name__)
_TRIES = 3  # at the smallest size
_GOOD_STEPS = 64  # successful steps before steps grow again; doubled after every failure ...
_MAX_GOOD_STEPS = 1 << 14  # ... up to this number


class StepBudget:
    """How many tokens a step may have, from the measured times of steps.

    A step of single tokens takes as long as reading the weights, and some prompt tokens beside them cost little. So
    prompts are computed in chunks beside running requests: small ones while few prompt tokens wait, and larger ones, at
    which the device computes most tokens per second, when more of them do.
    """

    def __init__(self, times: Sequence[tuple[int, float]], target: float | None = None) -> None:
        """`times` are numbers of tokens and seconds, the first of a step of single tokens. `target`: seconds that a
        step with prompt tokens should take."""
        (_, decode), *steps = times
        target = target or _DECODE_STEPS * decode
        allowed = [step for step in steps if step[1] <= _LONGEST] or steps[:1]
        best = max(tokens / seconds for tokens, seconds in allowed)
        self.small = max([tokens for tokens, seconds in steps if seconds <= target], default=steps[0][0])
        enough = [tokens for tokens, seconds in allowed if tokens / seconds >= _NEARLY * best]
        self.large = max(self.small, min(enough))
        self.alone = max(self.large, int(_LONGEST * best))  # while nobody waits for a next token
        self._sizes = [tokens for tokens, _ in steps]
        self._times = sorted(times)

    def least_seconds(self, num_tokens: int) -> float:
        """Lower bound of the time of a step with `num_tokens`: measured on rows without keys, and for no more
        tokens."""
        place = bisect_right(self._times, (num_tokens, float("inf")))
        return self._times[max(place - 1, 0)][1]

    def tokens(self, num_decodes: int, num_prompt_tokens: int) -> int:
        """Return the token budget of a step with `num_decodes` running requests, while `num_prompt_tokens` wait."""
        if not num_decodes:
            return self.alone
        size = self.small if num_prompt_tokens <= _DRAINING * self.small else self.large
        needed = num_decodes + size // 2
        if needed <= size:
            return size
        place = bisect_left(self._sizes, needed)  # steps have graphs of these sizes
        return self._sizes[place] if place < len(self._sizes) else needed


class StepPacing:
    """An observer that says how long planning the next step can wait.

    The device runs one step while the next is planned. A step that is planned at once leaves out every request that
    arrives before the device is done.
    """

    def __init__(self, budget: StepBudget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._in_flight: deque[int] = deque()  # tokens of each
        self._began = 0.0  # when the device began the first of them

    def seconds(self) -> float:
        """Seconds until the next step should be planned; 0 or less means now."""
        if len(self._in_flight) != 1:
            return 0.0
        least = self._budget.least_seconds(self._in_flight[0])
        return self._began + _WAITED * least - _PLANNING - self._clock()

    def planned(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._began = self._clock()
        self._in_flight.append(plan.total_tokens)

    def finished(self, result: StepResult) -> None:
        self._in_flight.popleft()
        self._began = self._clock()

    def restarted(self) -> None:
        self._in_flight.clear()


class StepSize:
    """A step that fails is tried again at the same size first, since its memory was released and other processes may
    have released theirs. After that steps are half as large, and double again after enough successful ones."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.limits.max_num_batched_tokens
        self._enough = min(self._full, scheduler.limits.max_num_seqs)  # below this some rows would have to wait
        self.is_normal = True  # steps have their full size, and the last failure is long ago
        self._failures = 0  # at this size
        self._good_steps = 0
        self._needed_steps = _GOOD_STEPS

    def failed(self, num_tokens: int) -> bool:
        """Record that a step of `num_tokens` did not fit. Returns False if there is nothing left to try."""
        self.is_normal = False
        self._failures += 1
        self._good_steps = 0
        self._needed_steps = min(2 * self._needed_steps, _MAX_GOOD_STEPS)
        limit, smaller = self._scheduler.limits.max_num_batched_tokens, max(num_tokens // 2, 1)
        if limit > self._enough:
            smaller = max(smaller, self._enough)
        if self._failures > 1 and smaller < limit and self._scheduler.limits.chunked_prefill:
            self._scheduler.limit_steps(smaller)
            self._failures = 1  # if a step of the new size fails, the next is smaller at once
        logger.warning(
            "a step of %d tokens did not fit the device's memory: all requests are recomputed, in steps of at most "
            "%d for now. To avoid this, lower gpu_memory_utilization or max_num_batched_tokens.",
            num_tokens, self._scheduler.limits.max_num_batched_tokens,
        )  # fmt: skip
        return self._failures < _TRIES

    def fitted(self) -> None:
        """Record that a step was successful, at less than the full size or soon after a failure."""
        self._good_steps += 1
        if self._good_steps >= self._needed_steps:
            self._good_steps = self._failures = 0
            limit = self._scheduler.limits.max_num_batched_tokens
            self.is_normal = limit == self._full
            self._scheduler.limit_steps(min(2 * limit, self._full))
