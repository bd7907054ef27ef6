"""How many tokens are drafted: as many as pay. A device whose steps take known times, and requests with known luck."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvasir.engine.draft_lengths import DraftLengths, StepTimes
from kvasir.engine.rows import Rows
from kvasir.engine.stats import SchedulerStats
from kvasir.messages import StepPlan, StepResult

MOST = 6


class Device:
    """Rows that generate, each with its own chance that a draft is right. Steps take 1 + `cost` for each draft."""

    def __init__(self, chances: list[float], cost: float, noise: float = 0.0) -> None:
        self.now, self.cost, self.noise = 100.0, cost, noise
        self.chances, self.random = np.array(chances), np.random.default_rng(0)
        rows = Rows(len(chances), 16)
        rows.most_drafts[:], rows.max_new[:], rows.key[:] = MOST, 1 + MOST, np.arange(len(chances))
        context = SimpleNamespace(clock=lambda: self.now)
        self.scheduler: Any = SimpleNamespace(rows=rows, context=context, stats=SchedulerStats())
        self.lengths = DraftLengths(self.scheduler, MOST, is_adaptive=True)
        self.drafts = np.zeros(len(chances), np.int32)
        self.tokens = 0

    def step(self) -> None:
        count, nothing = len(self.chances), np.zeros(0, np.int32)
        drafts = self.drafts
        plan = StepPlan(
            rows=np.arange(count, dtype=np.int32),
            num_tokens=1 + drafts,
            samples=np.ones(count, np.bool_),
            token_ids=np.full(int((1 + drafts).sum()), -1, np.int32),
            bounds=np.full(count, 9, np.int32),
            num_decodes=int((drafts == 0).sum()),
            new_rows=[],
            table_index=nothing,
            table_block=nothing,
            copies=nothing.reshape(0, 2),
            drafts=drafts if drafts.any() else None,
        )
        self.lengths.planned(plan)
        right = np.array([self._luck(chance, int(k)) for chance, k in zip(self.chances, drafts, strict=True)])
        self.now += 1 + self.cost * int(drafts.sum()) + self.noise * self.random.random()
        self.tokens += int(right.sum()) + count
        wanted = self.scheduler.rows.max_new - 1
        self.lengths.finished(StepResult(np.zeros((count, 1), np.int32), (1 + right).astype(np.int32), drafts=wanted))
        self.drafts = (self.scheduler.rows.max_new - 1).copy()

    def _luck(self, chance: float, count: int) -> int:
        right = 0
        while right < count and self.random.random() < chance:
            right += 1
        return right

    def speed(self, steps: int) -> float:
        """Tokens in the time of a step, for each row; 1 without drafts."""
        began, before = self.now, self.tokens
        for _ in range(steps):
            self.step()
        unit = 1 + self.noise / 2
        return (self.tokens - before) / len(self.chances) / (self.now - began) * unit


@pytest.mark.parametrize(("cost", "rows", "noise"), [(0.02, 1, 0.5), (0.1, 8, 0.0), (0.5, 1, 0.0), (0.5, 8, 0.5)])
def test_drafts_that_are_never_right_cost_little(cost: float, rows: int, noise: float) -> None:
    device = Device([0.0] * rows, cost / rows, noise)
    assert device.speed(1000) > 0.97
    stats = device.scheduler.stats
    assert stats.rows_paused > 900 * rows and stats.accepted_tokens == 0 < stats.draft_tokens


@pytest.mark.parametrize(("chance", "cost", "least"), [(0.9, 0.05, 3.0), (0.9, 0.3, 1.6), (0.6, 0.1, 1.5)])
def test_drafts_that_are_often_right_are_made(chance: float, cost: float, least: float) -> None:
    """About as fast as the best fixed number of drafts."""
    expected = [(1 - chance ** (k + 1)) / (1 - chance) / (1 + cost * k) for k in range(MOST + 1)]
    speed = Device([chance], cost).speed(600)
    assert speed > least and speed > 0.9 * max(expected)


def test_each_request_has_its_own_number() -> None:
    device = Device([0.95, 0.0], 0.1)
    device.speed(300)
    assert device.scheduler.rows.max_new[0] > 2
    drafted = [0, 0]
    for _ in range(200):
        device.step()
        drafted[0] += int(device.drafts[0])
        drafted[1] += int(device.drafts[1])
    assert drafted[0] > 20 * drafted[1]


def test_accepted_drafts_are_counted_by_position() -> None:
    device = Device([1.0], 0.01)
    device.speed(50)
    stats = device.scheduler.stats
    assert stats.accepted_tokens == stats.draft_tokens == sum(stats.accepted_by_position)
    assert len(stats.accepted_by_position) == MOST and stats.accepted_by_position[0] == stats.drafts


def test_times_are_those_of_undisturbed_steps() -> None:
    times = StepTimes()
    assert times.share(4, 1) is None
    for seconds in (1.0, 5.0, 1.0):
        times.record(1, seconds)
        times.record(5, 2 * seconds)
    assert times.share(3, 1) == pytest.approx(1.5, rel=0.1) and times.share(9, 1) == pytest.approx(3, rel=0.1)
