"""Which steps run as graphs when there is no memory for one. Nothing is captured here: that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

step_graphs = pytest.importorskip("kvasir.worker.step_graphs")


def single_tokens(rows: int) -> Any:
    return SimpleNamespace(rows=np.arange(rows), bounds=np.full(rows, 9), num_decodes=rows, shared_tokens=0)


def without_memory(run: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_whose_graph_found_no_memory_runs_without_one_for_a_while() -> None:
    absent: Any = None
    rows: Any = SimpleNamespace(padding=8)
    graphs = step_graphs.StepGraphs(absent, rows, absent, step_graphs.graph_sizes(8), torch.device("cpu"))
    graphs.pool.capture = without_memory
    shape = graphs.shape_for(single_tokens(3))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.forward(shape, *torch.zeros(5, 4, dtype=torch.int32))
    assert graphs.shape_for(single_tokens(7)) is not None, "others keep their graphs"
    found = [graphs.shape_for(single_tokens(3)) for _ in range(step_graphs.PUT_OFF + 1)]
    assert found == [None] * step_graphs.PUT_OFF + [shape]


def test_a_graph_is_captured_on_inputs_that_exist() -> None:
    """What the step before left in the buffers may be of a larger one, and would point past the end of this one's."""
    absent: Any = None
    rows: Any = SimpleNamespace(padding=999)
    graphs = step_graphs.StepGraphs(absent, rows, absent, step_graphs.graph_sizes(256), torch.device("cpu"))
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
    graphs = step_graphs.StepGraphs(absent, rows, absent, step_graphs.graph_sizes(256), torch.device("cpu"))
    plan = single_tokens(131)
    plan.bounds, plan.token_ids = np.random.default_rng(0).integers(1, 400, 131), np.full(131, -1)
    told, _, _, order = graphs.told(plan, graphs.shape_for(plan))
    assert sorted(order) == list(range(136)) and list(told[order[131:]]) == [999] * 5, "padding comes last"
    assert (np.diff(plan.bounds[order[:131]]) <= 0).all()
    few = single_tokens(8)
    few.token_ids = np.full(8, -1)
    assert not len(graphs.told(few, graphs.shape_for(few))[3])
