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
        graphs.forward(shape, *torch.zeros(4, 4, dtype=torch.int32))
    assert graphs.shape_for(single_tokens(7)) is not None, "others keep their graphs"
    found = [graphs.shape_for(single_tokens(3)) for _ in range(step_graphs.PUT_OFF + 1)]
    assert found == [None] * step_graphs.PUT_OFF + [shape]
