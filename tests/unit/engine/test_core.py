"""EngineCore: it schedules ahead of the device, and a failing device stops it cleanly."""

from __future__ import annotations

import pytest

from kvasir.engine.core import EngineCore
from kvasir.errors import DeviceMemoryError, EngineDeadError, EngineError
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import BeamSpec, GraphUse, SampleInputs, StepFuture, StepPlan, StepResult
from tests.builders import Collector, ScoringExecutor, expected, make_core, request, run


def launched_before_done(lookahead: int) -> list[bool]:
    """For each step but the first: was it launched while the step before was still running?"""
    executor = DelayExecutor(block_size=4, delay=0.15)  # long enough for a busy machine to plan a step meanwhile
    core = make_core(lookahead, executor)
    core.add(request(0, [1, 2, 3], 6))
    run(core)
    times = {(event, step): at for event, step, at in executor.log}
    return [times["execute", step] < times["done", step - 1] for step in range(2, 7)]


def test_next_step_is_scheduled_before_the_result_of_this_one() -> None:
    assert launched_before_done(lookahead=1) == [True] * 5


def test_without_lookahead_every_step_waits() -> None:
    assert launched_before_done(lookahead=0) == [False] * 5


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_lookahead_does_not_change_the_text(lookahead: int) -> None:
    core = make_core(lookahead, budget=16)
    prompts = {key: [key, 1, 2] * (key + 1) for key in range(6)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 10, stop=(3,)))
    got = run(core)
    assert got.tokens == {key: expected(prompt, 10, (3,)) for key, prompt in prompts.items()}


def test_a_failing_device_stops_the_engine_with_its_error() -> None:
    class Broken(DelayExecutor):
        def execute(self, plan) -> None:  # type: ignore[no-untyped-def]
            raise RuntimeError("the device fell off the bus")

    core = make_core(executor=Broken(block_size=4))
    core.add(request(0, [1], 1))
    with pytest.raises(EngineError, match="fell off the bus"):
        core.run_step()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        core.run_step()


class SmallMemory:
    """Makes an executor fail on steps of more than `most` tokens, in `execute` or in `sample`."""

    def __init__(self, core: EngineCore, most: int, where: str) -> None:
        self.most, self.failures, self.planned = most, 0, 0
        self.execute, self.sample = core.executor.execute, core.executor.sample
        core.executor.execute = self.run  # type: ignore[method-assign]
        if where == "sample":
            core.executor.sample = self.draw  # type: ignore[method-assign]
        self.where = where

    def check(self) -> None:
        if self.planned > self.most:
            self.failures += 1
            raise DeviceMemoryError("out of memory")

    def run(self, plan: StepPlan) -> None:
        self.planned = plan.total_tokens
        if self.where == "execute":
            self.check()
        self.execute(plan)

    def draw(self, inputs: SampleInputs | None = None) -> StepFuture:
        future = self.sample(inputs)
        self.check()
        return future


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("where", ["execute", "sample"])
def test_a_step_that_runs_out_of_memory_is_retried_in_smaller_steps(lookahead: int, where: str) -> None:
    core = make_core(lookahead, num_blocks=60, budget=64)
    memory = SmallMemory(core, 12, where)
    prompts = {key: [key, 1, 2] * (key + 3) for key in range(5)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 10))
    got = run(core)
    assert got.tokens == {key: expected(prompt, 10) for key, prompt in prompts.items()}
    assert memory.failures == 4 and core.stats().num_used_blocks == 0  # 64 twice, 32, 16, then 8


@pytest.mark.parametrize("rows", [1, 3])
def test_one_out_of_memory_error_does_not_change_the_step_size(rows: int) -> None:
    core = make_core(budget=64)
    memory = SmallMemory(core, 64, "execute")
    for key in range(rows):
        core.add(request(key, [key, 1, 2], 10))
    collector = Collector()
    for _ in range(4):
        collector.take(core.run_step())
    memory.most = 0
    core.run_step()
    memory.most = 64
    while core.has_work():
        collector.take(core.run_step())
    assert collector.tokens == {key: expected([key, 1, 2], 10) for key in range(rows)}
    assert memory.failures == 1 and core.scheduler.limits.max_num_batched_tokens == 64


def test_steps_grow_again_when_memory_is_free() -> None:
    core = make_core(num_blocks=400, budget=64, max_model_len=1200)
    memory = SmallMemory(core, 12, "execute")
    core.add(request(0, list(range(40)), 2))
    run(core)
    scheduler = core.scheduler
    assert scheduler.limits.max_num_batched_tokens == 10  # 40 failed twice, 20 once
    memory.most = 64
    for key in range(1, 4):
        core.add(request(key, [1, 2, 3], 1100))
        run(core)
    assert scheduler.limits.max_num_batched_tokens == 64


def test_a_step_that_always_fails_is_not_retried_forever() -> None:
    """The first chunk of a prompt works and the second fails, so starting over does not help."""
    core = make_core(budget=4, max_num_seqs=2)
    execute, calls = core.executor.execute, 0

    def run_first_parts(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if plan.samples.any():
            raise DeviceMemoryError("out of memory")
        execute(plan)

    core.executor.execute = run_first_parts  # type: ignore[method-assign]
    core.add(request(0, list(range(12)), 3))
    with pytest.raises(EngineError, match="out of memory"):
        run(core, max_steps=500)
    assert calls < 100


def test_out_of_memory_in_the_smallest_step_stops_the_engine() -> None:
    core = make_core(budget=64)
    SmallMemory(core, 0, "execute")
    core.add(request(0, [1, 2, 3, 4, 5], 3))
    with pytest.raises(EngineError, match="out of memory"):
        run(core)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("where", ["execute", "sample"])
def test_an_interrupted_step_is_recomputed(lookahead: int, where: str) -> None:
    core = make_core(lookahead, num_blocks=30)
    prompts = {key: [key, 1, 2] * (key + 2) for key in range(4)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 10))
    collector = Collector()
    call, calls = getattr(core.executor, where), iter(range(1000))

    def broken_off(*args):  # type: ignore[no-untyped-def]
        if next(calls) == 5:
            raise KeyboardInterrupt
        return call(*args)

    setattr(core.executor, where, broken_off)
    for _ in range(6):
        try:
            collector.take(core.run_step())
        except KeyboardInterrupt:
            assert core.scheduler.cache.pool.num_used == core.scheduler.cache.pool.num_cached == 0
            break
    else:
        pytest.fail("it was never broken off")
    while core.has_work():
        collector.take(core.run_step())
    assert collector.tokens == {key: expected(prompt, 10) for key, prompt in prompts.items()}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("num_blocks", [15, 16, 17])
def test_beams_and_a_large_request_do_not_deadlock(lookahead: int, num_blocks: int) -> None:
    executor = ScoringExecutor(4, 4, 60)
    executor.allocate_kv(num_blocks)
    settings = {"num_blocks": num_blocks, "max_num_seqs": 4, "budget": 64, "max_model_len": 60}
    core = make_core(lookahead, executor, **settings)
    beam = request(0, [1], 20)
    beam.beam = BeamSpec(width=2)
    core.add(beam)
    core.add(request(1, list(range(36)), 20))
    got = run(core, max_steps=1500)
    assert got.tokens[1] == expected(list(range(36)), 20)
    assert got.cached == {0: 0, 1: 0}, "a search is reported as started once"


@pytest.mark.parametrize(("budget", "threshold"), [(25, 0), (27, 0), (512, 16)])
def test_beams_share_their_prompt_again_after_starting_over(budget: int, threshold: int) -> None:
    """There is no room for a copy per beam, so beams must share the prompt although it is computed in chunks."""
    executor = ScoringExecutor(4, 8, 128)
    executor.allocate_kv(17)
    settings = {"num_blocks": 17, "budget": budget, "max_model_len": 128, "threshold": threshold}
    core = make_core(1, executor, **settings)
    core.add(request(0, [i % 7 for i in range(40)], 4, beam=BeamSpec(width=3)))
    while len(core.scheduler.rows) < 3:
        core.run_step()
    core.results.clear()
    core.scheduler.start_over()
    run(core, max_steps=100)
    assert core.stats().num_used_blocks == 0


def test_forgetting_prefixes_tells_the_observers_of_the_last_step() -> None:
    """Otherwise they would take each later result for that of the step before."""
    core = make_core(1)
    seen: list[str] = []

    class Watch:
        def planned(self, plan: StepPlan) -> None:
            seen.append("planned")

        def finished(self, result: StepResult) -> None:
            seen.append("finished")

        def restarted(self) -> None:
            pass

    core.observers.append(Watch())
    core.add(request(0, [1, 2, 3], 9))
    for _ in range(4):
        core.run_step()
    core.abort(0)
    assert core.results and core.reset_prefix_cache() and not core.results
    assert seen.count("planned") == seen.count("finished") > 0


def test_results_report_the_memory_of_graphs() -> None:
    core = make_core(1)
    sample, use = core.executor.sample, GraphUse(3, 5 << 20, late_compilations=2, late_captures=1)

    def sample_by_graph(inputs: SampleInputs | None = None) -> StepFuture:
        future = sample(inputs)
        future.result().graphs = use
        return future

    core.executor.sample = sample_by_graph  # type: ignore[method-assign]
    assert (core.stats().num_graphs, core.snapshot().memory.graphs) == (0, 0)
    core.add(request(0, [1, 2, 3], 2))
    run(core)
    stats = core.stats()
    assert (stats.num_graphs, stats.graph_bytes, stats.late_compilations, stats.late_captures) == (3, 5 << 20, 2, 1)
    assert core.snapshot().memory.graphs == 5 << 20
    core.executor.sample = sample  # type: ignore[method-assign]
    core.add(request(1, [1, 2, 3], 2))
    run(core)
    assert core.stats().num_graphs == 3, "a result without graph use keeps the last values"
