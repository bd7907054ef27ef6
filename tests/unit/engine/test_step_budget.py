"""How many tokens a step has beside running requests."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.engine.step_budget import StepBudget, StepPacing
from tests.builders import make_core, make_scheduler, request

# an 8B model on an H200
TIMES = [(16, 4.2e-3), (128, 4.9e-3), (256, 6.2e-3), (384, 8.3e-3), (512, 10e-3), (640, 12.8e-3), (768, 16.1e-3)]
TIMES += [(896, 18.7e-3), (1024, 20.8e-3)]


def test_prompts_beside_decodes_are_cut_into_cheap_chunks() -> None:
    budget = StepBudget(TIMES)
    assert (budget.small, budget.large) == (512, 512)
    assert budget.tokens(num_decodes=12, num_prompt_tokens=500) == 512
    assert StepBudget(TIMES, target=7e-3).tokens(num_decodes=12, num_prompt_tokens=500) == 256
    assert StepBudget(TIMES, target=7e-3).tokens(num_decodes=12, num_prompt_tokens=4000) == 384, "many tokens wait"
    assert budget.tokens(num_decodes=0, num_prompt_tokens=4000) == budget.alone > 4000, "nobody waits for a next token"


def test_decodes_leave_room_for_prompts() -> None:
    budget = StepBudget(TIMES)
    assert budget.tokens(num_decodes=300, num_prompt_tokens=500) == 640, "half a chunk at least, rounded up to a graph"
    assert budget.tokens(num_decodes=1000, num_prompt_tokens=500) == 1256


def test_a_target_is_kept() -> None:
    assert StepBudget(TIMES, target=5e-3).small == 128
    assert StepBudget(TIMES, target=1e-3).small == 128, "no step with prompt tokens is as short"
    assert StepBudget(TIMES, target=30e-3).small == 1024


def test_a_slow_device_computes_small_chunks() -> None:
    budget = StepBudget([(1, 0.2), (128, 0.9), (256, 1.7)])
    assert budget.small == budget.large == 128 and budget.alone == 128


@pytest.mark.parametrize("prompt", [100, 3000])
def test_the_scheduler_keeps_to_it(prompt: int) -> None:
    scheduler = make_scheduler(budget=8192, num_blocks=1000, block_size=16, max_model_len=4096)
    scheduler.step_budget = StepBudget(TIMES)
    scheduler.add(request(1, [1] * 20, max_tokens=1000))
    assert scheduler.schedule().total_tokens == 20  # type: ignore[union-attr]
    scheduler.add(request(2, list(range(prompt))))
    sizes = []
    while scheduler.rows.num_computed.max() < prompt:
        plan = scheduler.schedule()
        assert plan is not None
        sizes.append(plan.total_tokens)
        assert plan.num_tokens[0] == 1, "the first request goes on"
    assert sum(sizes) == prompt + len(sizes)
    assert max(sizes) == min(prompt + 1, 512), np.unique(sizes)


def test_the_next_step_is_planned_when_most_of_the_running_one_is_over() -> None:
    core, now = make_core(), [10.0]
    pacing = StepPacing(StepBudget(TIMES), lambda: now[0])
    assert pacing.seconds() <= 0, "the device runs nothing"
    core.scheduler.add(request(1, [1] * 20))
    plan = core.scheduler.schedule()
    assert plan is not None
    pacing.planned(plan)
    assert pacing.seconds() == pytest.approx(0.75 * 4.2e-3 - 1e-3)
    pacing.planned(plan)
    assert pacing.seconds() <= 0, "two are in flight: the older one's result comes first"
    now[0] = 11.0
    pacing.finished(None)  # type: ignore[arg-type]
    assert pacing.seconds() == pytest.approx(0.75 * 4.2e-3 - 1e-3), "the device began the second when the first ended"
    now[0] += 0.002
    assert pacing.seconds() == pytest.approx(0.75 * 4.2e-3 - 3e-3)
    pacing.restarted()
    assert pacing.seconds() <= 0


def test_a_core_waits_only_if_a_request_could_join() -> None:
    core = make_core(max_num_seqs=2)
    core.scheduler.step_budget = StepBudget([(16, 10.0), (128, 12.0)])
    assert core.seconds_to_wait() == 0.0, "times of steps are not known"
    core.pacing = StepPacing(core.scheduler.step_budget, core.scheduler.context.clock)
    core.observers.append(core.pacing)
    core.add(request(1, [1] * 3))
    core.step()
    assert core.seconds_to_wait() > 5
    core.add(request(2, [1] * 3))
    assert core.seconds_to_wait() == 0.0, "one waits already"
    core.step()
    core.step()
    assert not core.scheduler.rows.num_free and core.seconds_to_wait() == 0.0


def test_lower_bounds_of_times() -> None:
    budget = StepBudget(TIMES)
    assert [budget.least_seconds(n) for n in (1, 16, 127, 128, 700, 9000)] == [4.2e-3] * 3 + [4.9e-3, 12.8e-3, 20.8e-3]
