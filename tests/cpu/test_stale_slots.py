"""Slots that are no sequence's hold what an earlier request left, which may be NaN: nobody else's answer depends on it.

In Triton's interpreter, or on a GPU for real. Tensor descriptors are a GPU's; the interpreter is told to read by them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvasir.kernels.triton import paged_prefill as prefill
from kvasir.kernels.triton.paged_decode import Split, Workspace, paged_decode
from tests.kernel_builders import DEVICE, DTYPES, GPU, attend, close, paged, randn
from tests.pairwise import each_once, pairwise

pytestmark = pytest.mark.kernel

HEADS, KV_HEADS, DIM = 4, 2, 32


def spoiled(cache: torch.Tensor, tables: torch.Tensor, spans: list[tuple[int, int, int]]) -> torch.Tensor:
    """The cache with NaN and infinity everywhere but in the given tokens (row, first, end)."""
    block_size = cache.shape[2]
    slots = cache.transpose(1, 2).flatten(0, 1)  # [slots, 2, kv_heads, dim], a copy
    found = torch.full_like(slots, math.nan)
    found[::2] = math.inf
    for row, first, end in spans:
        token = torch.arange(first, end, device=DEVICE)
        at = tables[row, token // block_size].long() * block_size + token % block_size
        found[at] = slots[at]
    return found.unflatten(0, (-1, block_size)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "block_size", "descriptor"),
    each_once([None, 20, 100], [(16, False), (64, True), (256, True)], every=GPU),
)
def test_prefill(
    window: int | None, block_size: int, descriptor: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not GPU:
        monkeypatch.setattr(prefill, "reads_by_descriptor", lambda query, kv_cache: descriptor)
    lengths, chunks = [5, 150, 200, 131], [5, 150, 70, 1]
    cache, tables, rows, lens = paged(lengths, KV_HEADS, DIM, block_size, dtype)
    firsts = [max(0, n - chunk + 1 - window) if window else 0 for n, chunk in zip(lengths, chunks, strict=True)]
    dirty = spoiled(cache, tables, list(zip(rows.tolist(), firsts, lengths, strict=True)))
    starts = [0, *np.cumsum(chunks).tolist()]
    query = randn(starts[-1], HEADS, DIM, dtype=dtype)
    out = torch.full_like(query, 7.0)
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    prefill.paged_prefill(query, dirty, tables, rows, on_device, lens, max(chunks), out, DIM**-0.5, window)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("split", "window", "block_size"), pairwise([None, Split(4, 64)], [None, 20, 100], [16, 64], every=GPU)
)
def test_decode(split: Split | None, window: int | None, block_size: int, dtype: torch.dtype) -> None:
    lengths = [1, 17, 300, 64, 131]
    cache, tables, rows, lens = paged(lengths, KV_HEADS, DIM, block_size, dtype)
    firsts = [max(0, n - window) if window else 0 for n in lengths]
    dirty = spoiled(cache, tables, list(zip(rows.tolist(), firsts, lengths, strict=True)))
    query = randn(len(lengths), HEADS, DIM, dtype=dtype)
    out = torch.full_like(query, 7.0)
    paged_decode(query, dirty, tables, rows, lens, out, Workspace(), DIM**-0.5, window, split=split)
    for i, n in enumerate(lengths):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, window), dtype)
