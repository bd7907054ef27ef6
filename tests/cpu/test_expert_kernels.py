"""The Triton kernels of experts against their references: on the CPU with Triton's interpreter, on a GPU for real."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from kvasir.kernels import reference

pytest.importorskip("triton")

from kvasir.kernels.triton.experts import ExpertTile, choose_expert_tile, each_pair_alone, experts, route, sort_pairs
from kvasir.kernels.triton.one_row_experts import one_row_experts
from tests.kernel_builders import DEVICE, DTYPES, close, randn

pytestmark = pytest.mark.kernel
MODULE = import_module("kvasir.kernels.triton.experts")  # its function of the same name hides it
SOFTMAX = {"scoring": "softmax"}
GROUPED = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "by_two": True, "normalise": True, "scale": 2.5}


@pytest.mark.parametrize(
    ("count", "top_k", "how", "corrected"),
    [
        (6, 3, SOFTMAX, False),
        (128, 8, {**SOFTMAX, "normalise": True}, False),
        (8, 1, {"scoring": "sigmoid"}, False),
        (24, 5, {**GROUPED, "by_two": False}, True),
        (32, 6, GROUPED, True),
        (20, 3, {"scoring": "softmax", "groups": 5, "top_groups": 3, "scale": 16.0}, False),
    ],
    ids=str,
)
def test_route(count: int, top_k: int, how: dict[str, Any], corrected: bool) -> None:
    logits = randn(7, count) * 3
    logits[2] = 0.5  # all are equally good
    logits[3, : count // 2] = logits[3, count // 2 :]
    correction = randn(count) if corrected else None
    weights, chosen = route(logits, top_k, correction=correction, **how)
    wanted_weights, wanted = reference.route(logits, top_k, correction=correction, **how)
    alike = torch.tensor([2, 3], device=DEVICE)  # rows with experts that are equally good
    others = torch.tensor([0, 1, 4, 5, 6], device=DEVICE)
    assert chosen[others].tolist() == wanted[others].tolist()
    close(weights[others], wanted_weights[others], torch.float32)
    if not corrected and "groups" not in how:
        close(weights[alike], wanted_weights[alike], torch.float32)
    assert all(len(set(row)) == top_k and max(row) < count for row in chosen.tolist())


def test_scores_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 6), float("nan"), device=DEVICE)
    _, chosen = route(logits, 3, "softmax")
    assert ((chosen >= 0) & (chosen < 6)).all() and all(len(set(row)) == 3 for row in chosen.tolist())


@pytest.mark.parametrize(("tokens", "top_k", "count"), [(40, 3, 5), (1, 8, 16), (300, 2, 64)])
def test_sort(tokens: int, top_k: int, count: int) -> None:
    chosen = torch.rand(tokens, count, device=DEVICE).topk(top_k).indices.int()
    chosen[chosen == 3] = 2 if count == 5 else 3  # an expert without pairs
    order, starts = sort_pairs(chosen, count)
    assert order.tolist() == torch.argsort(chosen.view(-1), stable=True).tolist()
    bounds = torch.arange(count + 1, device=DEVICE, dtype=torch.int32)
    assert starts.tolist() == torch.searchsorted(chosen.view(-1).sort().values, bounds).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "activation", "bias"),
    [
        (1, 2, 8, "silu", False),  # each pair by itself
        (2, 1, 9, (1.7, 0.8), True),
        (40, 3, 5, "gelu_tanh", False),  # in tiles
        pytest.param(33, 2, 16, (1.7, 0.8), True, marks=pytest.mark.slow),
        (17, 1, 3, (1.7, 0.8), True),
    ],
    ids=str,
)
def test_experts(
    tokens: int, top_k: int, count: int, activation: str | tuple[float, float], bias: bool, dtype: torch.dtype
) -> None:
    hidden, inner = 72, 40
    x, gate_up = randn(tokens, hidden, dtype=dtype), randn(count, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    down = randn(count, hidden, inner, dtype=dtype) / inner**0.5
    biases = (randn(count, 2 * inner, dtype=dtype), randn(count, hidden, dtype=dtype)) if bias else (None, None)
    chosen = torch.rand(tokens, count, device=DEVICE).topk(top_k).indices
    weights = torch.rand(tokens, top_k, device=DEVICE)
    wide = [None if each is None else each.double() for each in biases]
    wanted = reference.experts(x.double(), weights.double(), chosen, gate_up.double(), down.double(), activation, *wide)
    got = experts(x, weights, chosen.int(), gate_up, down, activation, *biases)
    close(got, wanted, dtype)
    parts = experts(x, weights, chosen.int(), gate_up, down, activation, *biases, leave_parts=True)
    assert parts.shape == (top_k, tokens, hidden)
    close(parts.float().sum(0), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "pieces", "activation", "bias"),
    [
        (128, 64, 2, 0, "silu", False),
        (512, 192, 3, 2, "silu", False),  # a shared expert that is twice as wide
        (320, 256, 2, 0, (1.7, 0.8), True),
        (70, 24, 1, 1, "gelu_tanh", True),  # sizes that no block divides
    ],
    ids=str,
)
def test_one_row_with_what_stands_around_it(
    hidden: int,
    inner: int,
    top_k: int,
    pieces: int,
    activation: str | tuple[float, float],
    bias: bool,
    dtype: torch.dtype,
) -> None:
    count = 5
    x, gain = randn(1, hidden, dtype=dtype) * 3, randn(hidden, dtype=dtype)
    gate_up, down = (
        randn(count, 2 * inner, hidden, dtype=dtype) / hidden**0.5,
        randn(count, hidden, inner, dtype=dtype) / inner**0.5,
    )
    biases = (randn(count, 2 * inner, dtype=dtype), randn(count, hidden, dtype=dtype)) if bias else (None, None)
    shared = None
    if pieces:
        wide = pieces * inner
        shared = (
            randn(2 * wide, hidden, dtype=dtype) / hidden**0.5,
            randn(hidden, wide, dtype=dtype) / wide**0.5,
        )
    chosen = torch.rand(1, count, device=DEVICE).topk(top_k).indices
    weights = torch.rand(1, top_k, device=DEVICE)
    wanted = reference.fused_experts(
        x.double(), weights.double(), chosen, gate_up.double(), down.double(), activation,
        *[None if each is None else each.double() for each in biases], gain=gain.double(), eps=1e-5,
        shared=None if shared is None else (shared[0].double(), shared[1].double()),
    )  # fmt: skip
    for numbers in (chosen, chosen.int()):
        got = one_row_experts(
            x, weights, numbers, gate_up, down, activation, *biases, gain=gain, eps=1e-5, shared=shared
        )
        close(got, wanted, dtype)


@pytest.mark.parametrize(("tokens", "count"), [(1, 12), (20, 3)])
def test_experts_of_other_ranks_are_left_out(tokens: int, count: int) -> None:
    """They have the number after the last, and a weight of 0. `count` experts are here, and as many elsewhere."""
    x, weights = randn(tokens, 32), torch.rand(tokens, 3, device=DEVICE)
    gate_up, down = randn(count, 48, 32), randn(count, 32, 24)
    chosen = torch.rand(tokens, 2 * count, device=DEVICE).topk(3).indices.clamp(max=count)
    weights = torch.where(chosen < count, weights, 0.0)
    wanted = torch.zeros(tokens, 32, dtype=torch.float64, device=DEVICE)
    for token in range(tokens):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            if expert < count:
                inner = reference.gated_activation(gate_up[expert].double() @ x[token].double(), "silu")
                wanted[token] += weight * (down[expert].double() @ inner)
    for compute, numbers in ((reference.experts, chosen), (experts, chosen.int())):
        close(compute(x, weights, numbers, gate_up, down, "silu", is_apart=True), wanted, torch.float32)


def test_both_ways_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps take single pairs, larger ones tiles of several heights, and all give the same."""
    assert each_pair_alone(8, 128) and each_pair_alone(32, 128) and not each_pair_alone(40, 128)
    assert [choose_expert_tile(n, 128).rows for n in (64, 1024, 2048, 4096, 131072)] == [16, 16, 32, 64, 128]
    x, chosen = randn(12, 32), torch.rand(12, 6, device=DEVICE).topk(2).indices.int()
    weights, gate_up, down = torch.rand(12, 2, device=DEVICE), randn(6, 48, 32), randn(6, 32, 24)
    found = []
    for alone, rows in ((True, 16), (False, 16), (False, 32)):
        monkeypatch.setattr(MODULE, "each_pair_alone", lambda pairs, count, alone=alone: alone)
        tile = ExpertTile(rows, 32, 64, 16, 4, 2)
        monkeypatch.setattr(MODULE, "choose_expert_tile", lambda pairs, count, tile=tile: tile)
        found.append(experts(x, weights, chosen, gate_up, down, "silu"))
    close(found[0], found[1], torch.float32)
    close(found[2], found[1], torch.float32)
