"""Which steps run as graphs when there is no memory for one. Nothing is captured here: that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.sampling.state import NO_LINES, Needs

step_graphs = pytest.importorskip("kvasir.worker.step_graphs")
graph_shapes = pytest.importorskip("kvasir.worker.graph_shapes")


def single_tokens(rows: int) -> Any:
    return SimpleNamespace(rows=np.arange(rows), bounds=np.full(rows, 9), num_decodes=rows, shared=None)


def without_memory(run: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_whose_graph_found_no_memory_runs_without_one_for_a_while() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=8)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(8), torch.device("cpu"))
    released = []
    graphs.pool.release = lambda: released.append(1)
    graphs.pool.capture = without_memory
    assert graphs.shape_for(single_tokens(3)) is None and released == [1], "the very step that found none"
    graphs.pool.capture = lambda run: SimpleNamespace(outputs=None)
    assert graphs.shape_for(single_tokens(7)) is not None, "others have graphs"
    found = [graphs.shape_for(single_tokens(3)) for _ in range(step_graphs.PUT_OFF + 2)]
    assert found[:-2] == [None] * step_graphs.PUT_OFF and found[-1] == found[-2] is not None


def test_a_head_that_found_no_memory_is_put_off_by_itself() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=8)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(8), torch.device("cpu"))
    graphs.pool.release = lambda: None
    graphs.pool.capture = lambda run: SimpleNamespace(outputs=None)
    shape = graphs.shape_for(single_tokens(3))
    needs = Needs(filters=False, bans=False, logprob_lines=NO_LINES, num_logprobs=0)
    graphs.pool.capture = without_memory
    graphs._lines[:] = 1000  # of a larger step
    assert graphs.head_for(shape, 3, needs) is None and graphs._lines[:4].tolist() == [-1] * 4
    assert graphs.shape_for(single_tokens(3)) == shape is not None


def test_the_graphs_that_were_not_used_for_longest_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 4)
    absent: Any = None
    rows: Any = SimpleNamespace(padding=99)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(64), torch.device("cpu"))
    graphs.pool.capture = lambda run: SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=None)
    dropped: list[int] = []
    graphs.pool.drop = lambda graphs: dropped.append(len(graphs))
    needs = Needs(filters=False, bans=False, logprob_lines=NO_LINES, num_logprobs=0)
    nothing = torch.zeros(0, dtype=torch.int32)

    def step(count: int) -> None:
        shape = graphs.shape_for(single_tokens(count))
        graphs.forward(shape, torch.arange(count), nothing, nothing, nothing, absent)
        graphs.head(graphs.head_for(shape, count, needs))

    for count in (8, 16, 8, 24):
        step(count)
    assert {shape.rows for shape in graphs._forwards} == {8, 24} and {head.rows for head in graphs._heads} == {8, 24}
    assert dropped == [2] and graphs.use.graphs_dropped == 2 and graphs.use.num_graphs == 4
    step(16)
    assert {shape.rows for shape in graphs._forwards} == {16, 24} and graphs.use.graphs_dropped == 4


def test_heads_of_a_lone_forward_make_way_for_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What some rows ask for makes many heads of one forward."""
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 4)
    absent: Any = None
    rows: Any = SimpleNamespace(padding=99)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(64), torch.device("cpu"))
    graphs.pool.capture = lambda run: SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=None)
    graphs.pool.drop = lambda graphs: None
    shape = graphs.shape_for(single_tokens(64))
    scored = [1, 2, 4, 8, 2]
    for count in scored:
        lines = np.arange(count, dtype=np.int32)
        head = graphs.head_for(shape, 64, Needs(filters=False, bans=False, logprob_lines=lines, num_logprobs=3))
        assert head in graphs._heads and head.scored == count and head.likeliest == 5
    assert [head.scored for head in graphs._heads] == [8, 2] and graphs.use.graphs_dropped == 3
    assert list(graphs._forwards) == [shape]


def test_ranks_that_others_wait_for_do_not_go_on_alone() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=8)
    sizes = graph_shapes.graph_sizes(8)
    graphs = step_graphs.StepGraphs(absent, rows, absent, sizes, torch.device("cpu"), num_ranks=2)
    graphs.pool.capture = without_memory
    with pytest.raises(torch.OutOfMemoryError):
        graphs.shape_for(single_tokens(3))


def test_only_missing_memory_puts_a_graph_off() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=8)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(8), torch.device("cpu"))

    def broken(run: Callable[[], Any]) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs.pool.capture = broken
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.shape_for(single_tokens(3))


def test_a_graph_is_captured_on_inputs_that_exist() -> None:
    """What the step before left in the buffers may be of a larger one, and would point past the end of this one's."""
    absent: Any = None
    rows: Any = SimpleNamespace(padding=999)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(256), torch.device("cpu"))
    found = []

    def capture(run: Callable[[], Any]) -> Any:
        found.append([graphs._order[:rows].tolist() for rows in (128, 256)])
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=None)

    graphs.pool.capture = capture
    nothing = torch.zeros(0, dtype=torch.int32)
    for count in (256, 128):
        shape = graphs.shape_for(single_tokens(count))
        order = torch.arange(count - 1, -1, -1, dtype=torch.int32)
        graphs.forward(shape, torch.arange(count), nothing, nothing, order, nothing)
        assert graphs._order[:count].equal(order)
    assert found[0][1] == list(range(256)) and found[1][0] == list(range(128))


def test_the_device_is_told_to_begin_with_the_longest() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=999)
    graphs = step_graphs.StepGraphs(absent, rows, absent, graph_shapes.graph_sizes(256), torch.device("cpu"))
    plan = single_tokens(131)
    graphs.pool.capture = lambda run: None
    plan.bounds, plan.token_ids = np.random.default_rng(0).integers(1, 400, 131), np.full(131, -1)
    told, _, _, order, *_ = graphs.told(plan, graphs.shape_for(plan))
    assert sorted(order) == list(range(136)) and list(told[order[131:]]) == [999] * 5, "padding comes last"
    assert (np.diff(plan.bounds[order[:131]]) <= 0).all()
    few = single_tokens(8)
    few.token_ids = np.full(8, -1)
    assert not len(graphs.told(few, graphs.shape_for(few))[3])
