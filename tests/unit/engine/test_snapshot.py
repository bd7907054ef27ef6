"""Snapshots of the core: every block has one state, shared blocks are listed as shared, unused logs cost nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvasir.engine import snapshot
from kvasir.engine.core import EngineCore
from kvasir.engine.snapshot import StepLog
from kvasir.engine.stats import Snapshot
from tests.builders import make_core, request, run

PROMPT = [*range(1, 12)]  # two full blocks of four, and a half one


def blocks(snapshot: Snapshot) -> list[list[int]]:
    """Each running request's blocks."""
    held = iter(snapshot.held.tolist())
    return [[next(held) for _ in range(count)] for count in snapshot.num_held.tolist()]


def test_two_requests_with_one_prompt_share_its_blocks_and_none_after_they_end() -> None:
    core = make_core()
    core.add(request(7, PROMPT))
    core.add(request(8, PROMPT))
    core.run_step()
    seen = core.snapshot()
    first, second = blocks(seen)
    assert [each.key for each in seen.running] == [7, 8]
    assert first[:2] == second[:2] and first[2] != second[2]
    assert [each.num_cached for each in seen.running] == [0, 8]
    assert Counter(seen.held.tolist()) == {b: int(n) for b, n in enumerate(core.scheduler.cache.pool.ref_counts) if n}
    run(core)
    after = core.snapshot()
    assert len(after.held) == 0 and after.running == [] and after.stats.num_used_blocks == 0
    assert set(first[:2]) <= set(after.cached.tolist()), "they can still be hit"
    assert len(after.cached) == after.stats.num_cached_blocks


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_every_block_is_used_cached_or_empty(windows: tuple[int | None, ...]) -> None:
    core = make_core(windows=windows, num_blocks=40, budget=12)
    for key in range(12):
        core.add(request(key, [1, 2, 3, 4, 5, key % 3, 7, 8, key], max_tokens=30))
    while core.has_work():
        core.run_step()
        seen, pool = core.snapshot(), core.scheduler.cache.pool
        assert len(set(seen.held.tolist())) == pool.num_used
        assert not set(seen.held.tolist()) & set(seen.cached.tolist())
        assert 0 not in seen.held and 0 not in seen.cached
        assert len(seen.running) == seen.stats.num_running and len(seen.waiting) == seen.stats.num_waiting


def test_a_model_without_a_cache_has_figures_and_no_blocks() -> None:
    core = make_core(windows=(), num_blocks=2, caching=False)
    assert core.stats().sliding_window is None and core.stats().num_blocks == 0
    core.add(replace(request(1, PROMPT, 1), max_tokens=0))
    core.scheduler.schedule()
    seen = core.snapshot()
    assert seen.stats.num_running == 1 and seen.stats.num_used_blocks == 0
    assert len(seen.held) == 0 and seen.num_held.tolist() == [0] and len(seen.cached) == 0


def test_progress_of_running_and_waiting_requests() -> None:
    core = make_core(max_num_seqs=1, lookahead=0)
    core.add(request(1, PROMPT, max_tokens=5))
    core.add(request(2, PROMPT[:3], max_tokens=4))
    core.run_step()
    core.run_step()
    seen = core.snapshot()
    (running,), (waiting,) = seen.running, seen.waiting
    assert (running.num_prompt, running.num_output, running.max_output, running.num_computed) == (11, 2, 5, 12)
    assert (waiting.key, waiting.num_prompt, waiting.num_output, waiting.num_computed) == (2, 3, 0, 0)


def has_log(core: EngineCore) -> bool:
    return any(isinstance(observer, StepLog) for observer in core.observers)


def test_steps_are_logged_only_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: clock)
    core = make_core()
    core.add(request(1, PROMPT, max_tokens=40))
    core.run_step()
    assert not has_log(core)
    assert core.snapshot().steps == [], "none from before somebody began to watch"
    core.add(request(2, PROMPT, max_tokens=3))
    core.run_step()
    core.run_step()
    steps = core.snapshot().steps
    assert [(each.step, each.prompt_tokens, each.decode_tokens, each.sampled) for each in steps] == [
        (2, 3, 1, 2),
        (3, 0, 2, 2),
    ]
    assert core.snapshot(since_step=2).steps == steps[1:]
    clock += snapshot.LOG_SECONDS / 2
    core.run_step()
    assert has_log(core)
    clock += snapshot.LOG_SECONDS
    core.run_step()
    assert not has_log(core)


def test_preemptions_are_seen_in_the_step_that_made_them() -> None:
    core = make_core(num_blocks=9, block_size=4, lookahead=0)
    for key in range(2):
        core.add(request(key, [key, 2, 3], max_tokens=28))
    core.snapshot()
    while core.has_work():
        core.run_step()
    steps = core.snapshot().steps
    assert sum(each.preemptions for each in steps) == core.scheduler.stats.preemptions > 0
