"""Which graphs there are, and what a step sends to its own. Nothing is captured here: that needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.kernels.layout import max_unshared_tokens
from kvasir.messages import PrefixGroups, StepPlan
from kvasir.worker.step_inputs import host_inputs

step_graphs = pytest.importorskip("kvasir.worker.step_graphs")
keys = pytest.importorskip("kvasir.worker.graph_keys")
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
    sampler: Any = SimpleNamespace(features=[])
    graphs = step_graphs.StepGraphs(absent, state, sampler, keys.GraphKeys(max_rows, 64), CPU, num_ranks)
    graphs.pool.capture = captured
    return graphs


def captured(run: Callable[[], Any]) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=None)


def replay(graphs: Any, plan: StepPlan) -> Any:
    key = graphs.forward_key(plan)
    graphs.forward(key, host_inputs(plan, (), key, padding_row=999).to_device(CPU))
    return key


def test_every_key_is_captured_once_and_the_largest_first() -> None:
    graphs = make_graphs(64)
    graphs.capture()
    captured_keys = list(graphs.forwards)
    assert captured_keys == list(graphs.keys.forwards()) and len(set(captured_keys)) == len(captured_keys)
    assert captured_keys[0].tokens == max(key.tokens for key in captured_keys)
    assert [head.rows for head in graphs.heads] == sorted(graphs.keys.sizes, reverse=True)
    assert graphs.use.num_graphs == len(captured_keys) + len(graphs.heads) and graphs.use.late_captures == 0


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 16), (5, 32), (8, 2048), (256, 8192), (2048, 16384)])
def test_every_step_fits_a_graph_or_is_larger_than_all(max_rows: int, max_tokens: int) -> None:
    """Steps as the scheduler plans them: single tokens first, then chunks."""
    known = keys.GraphKeys(max_rows, max_tokens)
    captured_keys, rng, fitted = set(known.forwards()), np.random.default_rng(0), 0
    for _ in range(3000):
        decodes = int(rng.integers(0, max_rows + 1))
        chunks = int(rng.integers(decodes == 0, min(4, max_rows - decodes) + 1))
        left = min(max_tokens - decodes, int(rng.choice([40, 1200, max_tokens])))
        if 2 * chunks > left or decodes + chunks == 0:
            continue
        plan = single_tokens(decodes + chunks)
        plan.num_decodes = decodes
        plan.num_tokens[decodes:] = rng.integers(2, left // chunks + 1, chunks) if chunks else []
        plan.token_ids = np.zeros(plan.total_tokens, np.int32)
        plan.bounds[:] = rng.integers(1, 5000, len(plan.rows))
        if decodes >= 16 and rng.random() < 0.5:
            plan.shared = PrefixGroups(*(np.array(numbers, np.int32) for numbers in ([16], [0, 2], [0, 1])))
        key = known.fit(plan)
        if key is None:
            assert len(plan.rows) > 896 or plan.total_tokens > 1024, "no graph for a small step"
            continue
        fitted += 1
        shares = plan.shared is not None and (not chunks or key.tokens >= keys.MIN_SHARED_TOKENS)
        assert key in captured_keys and key.shares == shares
        assert len(plan.rows) <= key.rows and plan.total_tokens <= key.tokens and key.is_mixed == (chunks > 0)
        lines = int(rng.integers(1, len(plan.rows) + 1))
        assert lines <= known.head_rows(lines) <= key.rows, "a head would sample lines that the step did not leave"
        assert key.bound >= max_unshared_tokens(plan)
    assert fitted > 500


@pytest.mark.parametrize("num_drafts", [1, 3, 8, 14, 32])
@pytest.mark.parametrize("max_rows", [1, 3, 8, 65, 256, 2048])
def test_heads_of_rows_with_drafts_sample_only_lines_that_the_step_left(max_rows: int, num_drafts: int) -> None:
    known = keys.GraphKeys(max_rows, 8192, num_drafts)
    for key in known.forwards():
        heads = [known.head_rows(lines) for lines in range(1, key.lines + 1)]
        assert max(heads) <= key.lines, "a head would sample lines of an earlier step"


def test_graphs_captured_after_the_first_step_are_counted() -> None:
    graphs = make_graphs()
    graphs.capture()
    replay(graphs, single_tokens(3))
    graphs.capture()
    assert graphs.use.late_captures == 1


def test_ranks_that_others_wait_for_do_not_go_on_alone() -> None:
    def without_memory(run: Callable[[], Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = make_graphs(num_ranks=2)
    graphs.pool.capture = without_memory
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture()


def test_only_missing_memory_is_forgiven() -> None:
    graphs = make_graphs()

    def broken(run: Callable[[], Any]) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    graphs.pool.capture = broken
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.capture()


def test_graphs_are_captured_on_padding() -> None:
    """What a step left in the buffers would be computed, and may point past the end of a smaller step."""
    graphs = make_graphs(256)
    graphs.buffers.rows.fill_(3)
    graphs.buffers.order.fill_(900)
    graphs.buffers.lines.fill_(900)
    graphs.capture()
    buffers = graphs.buffers
    assert set(buffers.rows.tolist()) == {999} and buffers.order.tolist() == list(range(256))
    assert set(buffers.lines.tolist()) == {-1}


def test_the_device_begins_with_the_longest() -> None:
    graphs = make_graphs(256)
    graphs.capture()
    plan = single_tokens(131)
    plan.bounds = np.random.default_rng(0).integers(1, 400, 131).astype(np.int32)
    inputs = host_inputs(plan, (), graphs.forward_key(plan), padding_row=999)
    order = inputs.order
    assert sorted(order) == list(range(160)) and list(inputs.rows[order[131:]]) == [999] * 29, "padding comes last"
    assert (np.diff(plan.bounds[order[:131]]) <= 0).all()
    few = single_tokens(8)
    assert not len(host_inputs(few, (), graphs.forward_key(few), padding_row=999).order)


def test_ids_on_the_host_go_to_rows_of_single_tokens() -> None:
    """Only where some are given; the rows' own next tokens stay."""
    graphs = make_graphs(8)
    graphs.capture()
    next_token = graphs.buffers.state.next_token
    next_token[:3] = torch.tensor([7, 8, 9])
    plan = single_tokens(3)
    assert not len(host_inputs(plan, (), graphs.forward_key(plan), padding_row=999).token_ids)
    plan.token_ids = np.array([-1, 5, -1], np.int32)
    replay(graphs, plan)
    assert next_token[:3].tolist() == [7, 5, 9] and graphs.buffers.rows[:4].tolist() == [0, 1, 2, 999]
