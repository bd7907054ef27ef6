"""Adapters in the CPU library: the two products against plain operations, by every instruction set, and with the same
bits whatever tokens stand beside a token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvasir.kernels import reference
from kvasir.kernels.cpu import library, ops
from kvasir.kernels.layout import AdapterMatrices, TokenSlots
from tests.native_builders import SETS, require_library

# Inputs, and the outputs of each part: whole cache lines, tails, and more outputs than are summed at a time.
LAYERS = {"even": (64, (64, 32, 32)), "tails": (52, (40, 17, 7)), "wide": (96, (1500, 1300)), "narrow": (33, (5,))}
RANKS = (0, 1, 4, 7, 16)  # of the slots; the last token's slot has a gain and a shift as well


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    require_library()
    threads = library.num_threads()
    yield
    library.use_instruction_set(SETS[0])
    library.configure(threads)


def make_layer(name: str) -> AdapterMatrices:
    inputs, parts = LAYERS[name]
    torch.manual_seed(len(name))
    slots, rank, outputs = len(RANKS), max(RANKS), sum(parts)
    uses = torch.tensor([[each, int(slot in (0, slots - 1))] for slot, each in enumerate(RANKS)], dtype=torch.int32)
    shrink = torch.randn(slots, len(parts) * rank, inputs).to(torch.bfloat16)
    expand = torch.randn(slots, rank, outputs).to(torch.bfloat16)
    for slot, each in enumerate(RANKS):  # what is not in use must not be read
        shrink[slot].view(len(parts), rank, inputs)[:, each:] = float("nan")
        expand[slot, each:] = float("nan")
    return AdapterMatrices(
        shrink, expand, torch.rand(slots, outputs) + 0.5, torch.randn(slots, outputs), uses, tuple(parts)
    )


def make_tokens(layer: AdapterMatrices, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, layer.shrink.shape[2]).to(torch.bfloat16)
    y = torch.randn(count, layer.expand.shape[2]).to(torch.bfloat16)
    return x, y, torch.randint(-1, len(RANKS), (count,), dtype=torch.int32)


def adapted(layer: AdapterMatrices, x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return ops.adapt(x, y.clone(), layer, TokenSlots(slots, len(RANKS)))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", LAYERS)
def test_products_equal_those_of_plain_operations(name: str, instruction_set: str) -> None:
    library.use_instruction_set(instruction_set)
    layer = make_layer(name)
    x, y, slots = make_tokens(layer, 37)
    found = adapted(layer, x, y, slots).double()
    exact = AdapterMatrices(
        layer.shrink.nan_to_num().double(), layer.expand.nan_to_num().double(), layer.gain.double(),
        layer.shift.double(), layer.uses, layer.parts,
    )  # fmt: skip
    wanted = reference.adapt(x.double(), y.double(), exact, TokenSlots(slots, len(RANKS)))
    assert (found - wanted).norm() / wanted.norm() < 0.01
    assert torch.equal(found[slots == -1], y.double()[slots == -1])
    for slot in range(len(RANKS)):
        lines = slots == slot
        assert (found[lines] - wanted[lines]).norm() / wanted[lines].norm() < 0.01, f"rank {RANKS[slot]}"


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_token_has_the_same_bits_in_any_batch(name: str, instruction_set: str) -> None:
    """Alone, among tokens of its slot and others, and however threads share the work."""
    library.use_instruction_set(instruction_set)
    layer = make_layer(name)
    x, y, slots = make_tokens(layer, 23)
    whole = adapted(layer, x, y, slots)
    for count in (1, 2, 3, 5):
        for first in range(0, len(x), count):
            some = slice(first, first + count)
            assert torch.equal(adapted(layer, x[some], y[some], slots[some]), whole[some]), f"{count} tokens"
    for threads in (2, 3, 8):
        library.configure(threads)
        for some in (slice(None), slice(0, 2)):
            assert torch.equal(adapted(layer, x[some], y[some], slots[some]), whole[some]), f"{threads} threads"
