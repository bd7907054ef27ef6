"""How many tokens are drafted for each request: as many as pay, by measured times of steps and measured acceptance.

A draft pays if the chance that it is accepted is worth more than the time that it adds to the step. The chance is that
of the request's own recent drafts; a request starts with that of all requests. A request whose drafts do not pay makes
none for a while, then tries again, less and less often. Core process; one of the core's observers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import Int32Array, StepPlan, StepResult

if TYPE_CHECKING:
    from kvasir.engine.scheduler import Scheduler

FORGET = 0.85  # weight of what was known of a request's acceptance, against one step's drafts
SLOW_FORGET = 0.99  # the same for all requests together
MARGIN = 0.03  # by which drafts must make steps faster
FIRST_CHANCE = 0.6  # that a draft is accepted, before any was seen
FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # steps of a request without drafts after drafts that did not pay
REFRESH = 16  # steps after which costs are computed again
GROWTH = 1.02  # by which a step's time may grow with each further step of its size
UNKNOWN_COST = 0.15  # of each draft of each row, in steps, before times are known


@dataclass(slots=True)
class _Planned:
    time: float
    rows: Int32Array
    keys: NDArray[np.int64]
    samples: NDArray[np.bool_]
    drafts: Int32Array | None
    num_tokens: int
    is_decode: bool  # nothing but generation


class StepTimes:
    """Recent times of steps by their numbers of tokens. The fastest times are kept, because others were disturbed."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        size = _bucket(num_tokens)
        self._times[size] = min(seconds, GROWTH * self._times.get(size, seconds))

    def share(self, num_tokens: int, num_rows: int) -> float | None:
        """Time of a step of `num_tokens`, relative to a step of single tokens; None if it is not known."""
        base = self._times.get(_bucket(num_rows))
        known = sorted(size for size in self._times if size >= num_rows)
        if base is None or len(known) < 2:
            return None
        sizes, times = known, [self._times[size] / base for size in known]
        slope = max(0.0, (times[-1] - 1) / (sizes[-1] - sizes[0]))
        if num_tokens > sizes[-1]:
            return times[-1] + slope * (num_tokens - sizes[-1])
        return float(np.interp(num_tokens, sizes, times))


def _bucket(num_tokens: int) -> int:
    """Return the bucket of a number of tokens: exact up to 16, then in steps of an eighth."""
    if num_tokens <= 16:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // unit * unit


class DraftLengths:
    def __init__(self, scheduler: Scheduler, num_drafts: int, is_adaptive: bool) -> None:
        size = len(scheduler.rows.key)
        self._scheduler = scheduler
        self._most = num_drafts
        self._is_adaptive = is_adaptive
        self._in_flight: deque[_Planned] = deque()
        self._last_end = 0.0
        self.times = StepTimes()
        self._known_costs: dict[int, tuple[int, NDArray[np.float64]]] = {}  # by rows: step of the calculation, costs
        self._num_steps = 0
        self._chance_of_all = FIRST_CHANCE
        # by row
        self._keys: NDArray[np.int64] = np.full(size, -1, np.int64)
        self._chance = np.zeros(size)
        self._pause: Int32Array = np.zeros(size, np.int32)  # length of the next pause
        self._left: Int32Array = np.zeros(size, np.int32)  # steps until drafts are tried again
        self._waiting: Int32Array = np.zeros(size, np.int32)  # drafts that the device has for the row

    def planned(self, plan: StepPlan) -> None:
        drafts = plan.drafts
        is_decode = plan.num_decodes == len(plan.rows)
        if drafts is not None:
            is_decode = bool((plan.num_tokens - drafts == 1).all())
        is_decode = is_decode and bool(plan.samples.all())
        keys = self._scheduler.rows.key[plan.rows]
        now = self._scheduler.context.clock()
        self._in_flight.append(_Planned(now, plan.rows, keys, plan.samples, drafts, plan.total_tokens, is_decode))

    def restarted(self) -> None:
        self._in_flight.clear()

    def finished(self, result: StepResult) -> None:
        step = self._in_flight.popleft()
        self._num_steps += 1
        now = self._scheduler.context.clock()
        seconds, self._last_end = now - max(step.time, self._last_end), now
        if step.is_decode:
            self.times.record(step.num_tokens, seconds)
        lines = np.flatnonzero(step.samples & (result.counts > 0) & (self._scheduler.rows.key[step.rows] == step.keys))
        rows = step.rows[lines]
        new = self._keys[rows] != step.keys[lines]
        if new.any():
            self._begin(rows[new], step.keys[lines][new])
        drafted = np.zeros(len(rows), np.int32)
        if step.drafts is not None:
            drafted = np.minimum(step.drafts[lines], self._waiting[rows])
        self._waiting[rows] = self._most if result.drafts is None else result.drafts[lines]
        self._count(drafted, result.counts[lines] - 1)
        if self._is_adaptive:
            self._learn(rows, drafted, result.counts[lines] - 1)
            self._choose(rows, drafted > 0)

    def _begin(self, rows: Int32Array, keys: NDArray[np.int64]) -> None:
        self._keys[rows] = keys
        self._chance[rows] = self._chance_of_all
        self._pause[rows], self._left[rows], self._waiting[rows] = FIRST_PAUSE, 0, 0

    def _count(self, drafted: Int32Array, accepted: Int32Array) -> None:
        stats = self._scheduler.stats
        stats.drafts += int((drafted > 0).sum())
        stats.draft_tokens += int(drafted.sum())
        stats.rows_without_drafts += int((drafted == 0).sum())
        if drafted.any():
            accepted = np.minimum(accepted, drafted)
            stats.accepted_tokens += int(accepted.sum())
            missing = self._most - len(stats.accepted_by_position)
            stats.accepted_by_position += [0] * missing
            for position in range(int(accepted.max(initial=0))):
                stats.accepted_by_position[position] += int((accepted > position).sum())

    def _learn(self, rows: Int32Array, drafted: Int32Array, accepted: Int32Array) -> None:
        """Update chances: each accepted draft is a success, and the first wrong one a failure."""
        tried = drafted > 0
        if not tried.any():
            return
        rows, right = rows[tried], np.minimum(accepted, drafted)[tried]
        trials = right + (right < drafted[tried])
        known = FORGET**trials
        self._chance[rows] = known * self._chance[rows] + (1 - known) * right / trials
        share = SLOW_FORGET ** int(trials.sum())
        self._chance_of_all = share * self._chance_of_all + (1 - share) * float(right.sum() / trials.sum())

    def _best_lengths(self, chance: NDArray[np.float64], num_rows: int) -> Int32Array:
        """Return for each chance the number of drafts that yields most tokens per second, if all rows had as many. It
        is 0 unless it is at least MARGIN faster than none."""
        drafts, cost = np.arange(self._most + 1), self._costs(num_rows)
        chance = np.clip(chance, 0.0, 0.999)[:, None]
        tokens = (1 - chance ** (drafts + 1)) / (1 - chance)  # expected of a row, with one that is always right
        speed = tokens / cost
        speed[:, 1:] -= MARGIN
        best: Int32Array = speed.argmax(axis=1).astype(np.int32)
        return best

    def _costs(self, num_rows: int) -> NDArray[np.float64]:
        """Times of steps in which every row has 0, 1, ... drafts, relative to a step without drafts."""
        age, known = self._known_costs.get(num_rows, (-REFRESH, None))
        if known is None or self._num_steps - age >= REFRESH:
            shares = [self.times.share(num_rows * (1 + k), num_rows) for k in range(self._most + 1)]
            known = np.array([1 + UNKNOWN_COST * k if share is None else share for k, share in enumerate(shares)])
            self._known_costs[num_rows] = self._num_steps, known
        return known

    def _choose(self, rows: Int32Array, tried: NDArray[np.bool_]) -> None:
        """Set how many tokens are drafted for each row."""
        r, count = self._scheduler.rows, len(rows)
        may = r.most_drafts[rows] > 0
        rows, tried = rows[may], tried[may]
        if not len(rows):
            return
        lengths = self._best_lengths(self._chance[rows], count)
        resting = self._left[rows] > 0
        self._left[rows] -= resting
        fails = (lengths == 0) & ~resting & tried
        self._left[rows[fails]] = self._pause[rows[fails]]
        self._pause[rows[fails]] = np.minimum(2 * self._pause[rows[fails]], LONGEST_PAUSE)
        works = (lengths > 0) & tried
        self._pause[rows[works]] = FIRST_PAUSE
        lengths = np.where(self._left[rows] > 0, 0, np.maximum(lengths, 1))  # after a pause one draft is tried
        self._scheduler.stats.rows_paused += int((lengths == 0).sum())
        r.max_new[rows] = 1 + lengths
        r.num_drafts[rows] = np.minimum(r.num_drafts[rows], lengths)
