"""Which steps run as graphs when there is no memory for one. Nothing is captured here: that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.messages import StepPlan
from kvasir.sampling.features import SampledLines
from kvasir.sampling.logprobs import ScoreKey, ScoreUse, TokenScores
from kvasir.worker.step_inputs import host_inputs

step_graphs = pytest.importorskip("kvasir.worker.graphs.step_graphs")
graph_cache = pytest.importorskip("kvasir.worker.graphs.cache")
keys = pytest.importorskip("kvasir.worker.graphs.keys")
CPU = torch.device("cpu")


def single_tokens(rows: int) -> StepPlan:
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=np.ones(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        token_ids=np.full(rows, -1, np.int32),
        bounds=np.full(rows, 9, np.int32),
        num_decodes=rows,
        new_rows=[],
        table_index=nothing,
        table_block=nothing,
        copies=nothing.reshape(0, 2),
    )


def make_graphs(max_rows: int = 8, num_ranks: int = 1) -> Any:
    """Graphs of a model that is never run."""
    absent: Any = None
    state: Any = SimpleNamespace(padding=999, next_token=torch.zeros(1000, dtype=torch.int32))
    return step_graphs.StepGraphs(absent, state, absent, keys.graph_sizes(max_rows), CPU, num_ranks)


def captured(run: Callable[[], Any]) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=None)


def without_memory(run: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def replay(graphs: Any, plan: StepPlan) -> Any:
    key = graphs.forward_key(plan)
    graphs.forward(key, host_inputs(plan, (), key, padding_row=999).to_device(CPU))
    return key


def test_a_step_whose_graph_found_no_memory_runs_without_one_for_a_while() -> None:
    graphs = make_graphs()
    released: list[int] = []
    graphs.cache.pool.release = lambda: released.append(1)
    graphs.cache.pool.capture = without_memory
    assert graphs.forward_key(single_tokens(3)) is None and released == [1], "the very step that found none"
    graphs.cache.pool.capture = captured
    assert graphs.forward_key(single_tokens(7)) is not None, "others have graphs"
    found = [graphs.forward_key(single_tokens(3)) for _ in range(graph_cache.DEFERRED_STEPS + 2)]
    assert found[:-2] == [None] * graph_cache.DEFERRED_STEPS and found[-1] == found[-2] is not None


def test_a_head_that_found_no_memory_is_deferred_by_itself() -> None:
    graphs = make_graphs()
    graphs.cache.pool.release = lambda: None
    graphs.cache.pool.capture = captured
    key = graphs.forward_key(single_tokens(3))
    graphs.cache.pool.capture = without_memory
    graphs.buffers.lines[:] = 1000  # of a larger step
    assert graphs.head_key(key, 3, []) is None and graphs.buffers.lines[:4].tolist() == [-1] * 4
    assert graphs.forward_key(single_tokens(3)) == key is not None


def test_the_least_recently_used_graphs_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 4)
    graphs = make_graphs(64)
    cache = graphs.cache
    cache.pool.capture = captured
    dropped: list[int] = []
    cache.pool.drop = lambda graphs: dropped.append(len(graphs))

    def step(count: int) -> None:
        plan = single_tokens(count)
        key = replay(graphs, plan)
        sampled = SampledLines(plan, np.arange(count, dtype=np.int32), plan.rows)
        graphs.head(graphs.head_key(key, count, []), sampled, [])

    for count in (8, 16, 8, 24):
        step(count)
    assert {key.rows for key in cache.forwards} == {8, 24} and {head.rows for head in cache.heads} == {8, 24}
    assert dropped == [2] and graphs.use.graphs_dropped == 2 and graphs.use.num_graphs == 4
    step(16)
    assert {key.rows for key in cache.forwards} == {16, 24} and graphs.use.graphs_dropped == 4


def test_heads_of_a_single_forward_are_evicted_for_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What some rows ask for makes many heads of one forward."""
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 4)
    graphs = make_graphs(64)
    graphs.cache.pool.capture = captured
    graphs.cache.pool.drop = lambda graphs: None
    key = graphs.forward_key(single_tokens(64))
    scores = TokenScores("raw_logprobs", 65, CPU)
    for count in [1, 2, 4, 8, 2]:
        lines = np.arange(count, dtype=np.int32)
        use = ScoreUse(ScoreKey(count, 3, named=False), num_entries=count, index=lines, plan_lines=lines)
        head = graphs.head_key(key, 64, [(scores, use)])
        assert head in graphs.cache.heads and head.uses == ((scores, ScoreKey(count, 5, named=False)),)
    assert [head.uses[0][1].lines for head in graphs.cache.heads] == [8, 2] and graphs.use.graphs_dropped == 3
    assert list(graphs.cache.forwards) == [key]


def test_ranks_that_others_wait_for_do_not_go_on_alone() -> None:
    graphs = make_graphs(num_ranks=2)
    graphs.cache.pool.capture = without_memory
    with pytest.raises(torch.OutOfMemoryError):
        graphs.forward_key(single_tokens(3))


def test_only_missing_memory_defers_a_graph() -> None:
    graphs = make_graphs()

    def broken(run: Callable[[], Any]) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs.cache.pool.capture = broken
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.forward_key(single_tokens(3))


def test_a_graph_is_captured_on_inputs_that_exist() -> None:
    """What the step before left in the buffers may be of a larger one, and would point past the end of this one's."""
    graphs = make_graphs(256)
    found = []

    def capture(run: Callable[[], Any]) -> Any:
        found.append([graphs.buffers.order[:rows].tolist() for rows in (128, 256)])
        return captured(run)

    graphs.cache.pool.capture = capture
    for count in (256, 128):
        plan = single_tokens(count)
        plan.bounds = np.arange(1, count + 1, dtype=np.int32)
        replay(graphs, plan)
        assert graphs.buffers.order[:count].tolist() == list(range(count - 1, -1, -1))
    assert found[0][1] == list(range(256)) and found[1][0] == list(range(128))


def test_the_device_begins_with_the_longest() -> None:
    graphs = make_graphs(256)
    graphs.cache.pool.capture = captured
    plan = single_tokens(131)
    plan.bounds = np.random.default_rng(0).integers(1, 400, 131).astype(np.int32)
    inputs = host_inputs(plan, (), graphs.forward_key(plan), padding_row=999)
    order = inputs.order
    assert sorted(order) == list(range(136)) and list(inputs.rows[order[131:]]) == [999] * 5, "padding comes last"
    assert (np.diff(plan.bounds[order[:131]]) <= 0).all()
    few = single_tokens(8)
    assert not len(host_inputs(few, (), graphs.forward_key(few), padding_row=999).order)


def test_ids_on_the_host_go_to_rows_of_single_tokens() -> None:
    """Only where some are given; the rows' own next tokens stay."""
    graphs = make_graphs(8)
    graphs.cache.pool.capture = captured
    next_token = graphs.buffers.state.next_token
    next_token[:3] = torch.tensor([7, 8, 9])
    plan = single_tokens(3)
    assert not len(host_inputs(plan, (), graphs.forward_key(plan), padding_row=999).token_ids)
    plan.token_ids = np.array([-1, 5, -1], np.int32)
    replay(graphs, plan)
    assert next_token[:3].tolist() == [7, 5, 9] and graphs.buffers.rows[:4].tolist() == [0, 1, 2, 999]
