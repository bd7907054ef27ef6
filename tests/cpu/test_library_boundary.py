"""What the CPU library is given: wrong types and shapes are refused before it sees them, what is no number stays none,
and its threads may be set anew while others compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvasir.attention.cpu import CpuAttention
from kvasir.attention.torch import TorchAttention
from kvasir.kernels import reference
from kvasir.kernels.cpu import library, ops, packed
from kvasir.kernels.cpu.ops import StepView
from tests.cpu.test_cpu_kernels import BFLOAT, FORMATS, close, instruction_set, make_batch, randn

__all__ = ["instruction_set"]  # a fixture: all of this on every instruction set
ROOT = Path(__file__).parent.parent.parent


# ---------------------------------------------------------------- types and shapes


def step_inputs(**other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = {
        "rows": torch.tensor([1, 0]),
        "num_tokens": torch.tensor([1, 2], dtype=torch.int32),
        "token_ids": torch.tensor([5, 6, 7], dtype=torch.int32),
        "num_computed": torch.tensor([3, 4], dtype=torch.int32),
        "next_token": torch.tensor([8, 9], dtype=torch.int32),
        "tables": torch.arange(8, dtype=torch.int32).view(2, 4),
    }
    return ops.step_inputs(**(given | other), block_size=4)


def attend(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return CpuAttention().forward(query, cache, make_batch([(3, 1)], 16), scale=1.0, window=None)


def view(name: str, tensor: torch.Tensor) -> StepView:
    batch = make_batch([(3, 1)], 16)
    setattr(batch, name, tensor)
    return StepView(batch)


WRONG: dict[str, Callable[[], object]] = {
    "rows apart": lambda: step_inputs(rows=torch.tensor([1, 9, 0, 9])[::2]),
    "rows of int32": lambda: step_inputs(rows=torch.tensor([1, 0], dtype=torch.int32)),
    "counts of int64": lambda: step_inputs(num_tokens=torch.tensor([1, 2])),
    "more tokens than ids": lambda: step_inputs(num_tokens=torch.tensor([1, 3], dtype=torch.int32)),
    "fewer tokens than ids": lambda: step_inputs(num_tokens=torch.tensor([1, 1], dtype=torch.int32)),
    "a count below zero": lambda: step_inputs(num_tokens=torch.tensor([4, -1], dtype=torch.int32)),
    "tables the other way": lambda: step_inputs(tables=torch.arange(8, dtype=torch.int32).view(4, 2).T),
    "slots of int32": lambda: view("slots", torch.zeros(1, dtype=torch.int32)),
    "tables of int64": lambda: view("tables", torch.zeros(1, 1, dtype=torch.int64)),
    "float32 queries": lambda: attend(torch.zeros(1, 2, 16), randn(2, 2, 16, 2, 16)),
    "a float32 cache": lambda: attend(randn(1, 2, 16), torch.zeros(2, 2, 16, 2, 16)),
    "a narrow row": lambda: packed.pack(randn(32, 64)).linear(randn(3, 40)),
    "a wide row": lambda: packed.pack(randn(32, 64)).gated_linear(randn(3, 80), "silu"),
    "float32 rows": lambda: packed.pack(randn(32, 64)).linear(torch.zeros(3, 64)),
    "cannot be halved": lambda: packed.pack(randn(41, 64)).gated_linear(randn(3, 64), "silu"),
    "a row beyond": lambda: packed.pack(randn(32, 64)).rows(torch.tensor([3, 32])),
    "a row before": lambda: packed.pack(randn(32, 64)).rows(torch.tensor([-1])),
    "filled beyond": lambda: packed.pack(randn(32, 64)).fill(randn(8, 64), 25),
    "filled with narrow rows": lambda: packed.pack(randn(32, 64)).fill(randn(8, 32)),
    "a bias of float32": lambda: packed.pack(randn(32, 64), bias=torch.zeros(32)),
    "a short bias": lambda: packed.pack(randn(32, 64), bias=randn(16)),
    "a residual of other rows": lambda: ops.add_rms_norm(randn(3, 64), randn(2, 64), randn(64), 1e-6),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        call()


def test_step_inputs_that_fit() -> None:
    assert [found.tolist() for found in step_inputs()] == [[5, 6, 7], [4, 3, 4], [20, 3, 4], [0, 1, 3], [5, 5]]


def test_what_the_reference_takes_is_taken() -> None:
    parts, residual, gain = randn(3, 5, 64), randn(5, 64), randn(64)
    for got, wanted in zip(
        ops.add_rms_norm(parts, residual, gain, 1e-6), reference.add_rms_norm(parts, residual, gain, 1e-6), strict=True
    ):
        close(got, wanted)
    caches = [torch.zeros(2, 2, 4, 1, 16, dtype=BFLOAT) for _ in range(2)]
    qkv, positions, slots = randn(2, 48), torch.tensor([0, 1]), torch.tensor([5, 2], dtype=torch.int32)
    for version, cache in zip((ops, reference), caches, strict=True):
        version.rope_store(qkv.clone(), 1, positions, None, cache, slots)
    assert torch.equal(*caches)


@pytest.mark.parametrize("head_dim", [1056, 2048])
def test_heads_of_any_size(head_dim: int) -> None:
    batch = make_batch([(30, 1), (0, 5)], 16)
    cache, query = randn(int(batch.tables.max()) + 1, 2, 16, 1, head_dim), randn(6, 2, head_dim)
    wanted = TorchAttention().forward(query.float(), cache.float(), batch, scale=0.02, window=None)
    batch.step_cache.clear()
    close(CpuAttention().forward(query, cache, batch, scale=0.02, window=None), wanted, 8e-3)


# ---------------------------------------------------------------- no numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_product_of_what_is_no_number_is_none(name: str, rows: int, bad: float) -> None:
    matrix, x = packed.pack(randn(48, 64), FORMATS[name]), randn(rows, 64)
    wanted = matrix.linear(x)
    x[rows // 2, 40] = bad
    got = matrix.linear(x)
    spoilt = torch.arange(rows) == rows // 2
    assert not got[spoilt].isfinite().any() and torch.equal(got[~spoilt], wanted[~spoilt])


@pytest.mark.parametrize("length", [5, 2000])
def test_attention_of_what_is_no_number_is_none(length: int) -> None:
    batch = make_batch([(length, 1)], 16)
    cache, query = randn(int(batch.tables.max()) + 1, 2, 16, 2, 64), randn(1, 4, 64)
    query[0, 1, 7] = float("nan")
    got = CpuAttention().forward(query, cache, batch, scale=0.1, window=None)
    assert got[0, 1].isnan().all() and got[0, [0, 2, 3]].isfinite().all()


def test_what_is_behind_the_window_or_the_end_does_not_matter() -> None:
    """Blocks there may be another request's by now, whatever it left in them."""
    batch = make_batch([(100, 1), (37, 3)], 16)
    cache, query = randn(int(batch.tables.max()) + 1, 2, 16, 2, 64), randn(4, 4, 64)
    wanted = CpuAttention().forward(query, cache, batch, scale=0.1, window=20)
    for line, (first, last) in enumerate([(101 - 20, 101), (38 - 20, 40)]):
        for position in range(batch.tables.shape[1] * 16):
            if not first <= position < last:
                cache[batch.tables[line, position // 16], :, position % 16] = float("nan")
    assert torch.equal(CpuAttention().forward(query, cache, batch, scale=0.1, window=20), wanted)


# ---------------------------------------------------------------- threads


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = library.num_threads()
    yield
    library.configure(before)


@pytest.mark.usefixtures("threads_as_before")
def test_threads_are_set_while_others_compute() -> None:
    matrix, x, wrong, done = packed.pack(randn(320, 64)), randn(40, 64), [], threading.Event()
    wanted = matrix.linear(x)

    def compute() -> None:
        while not done.is_set():
            if not torch.equal(matrix.linear(x), wanted):
                wrong.append(1)

    caller = threading.Thread(target=compute, daemon=True)
    caller.start()
    for round_ in range(100):
        library.configure(1 + round_ % 3)
    done.set()
    caller.join(60)
    assert not caller.is_alive() and not wrong
