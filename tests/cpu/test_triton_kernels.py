"""Triton kernels against their references: on the CPU with Triton's interpreter, on a GPU for real (-m gpu)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.kernels import reference
from kvasir.kernels.layout import AdapterMatrices, TokenSlots
from kvasir.kernels.reference import encoder_attention as encoder_reference

pytest.importorskip("triton")

from kvasir.attention import triton as triton_attention
from kvasir.attention.base import AttentionBatch
from kvasir.attention.triton import TritonAttention
from kvasir.kernels.layout import find_tiles
from kvasir.kernels.triton import adapters, launch, linear, shared_prefix
from kvasir.kernels.triton import paged_decode as paged_decode_module
from kvasir.kernels.triton.adapters import adapt
from kvasir.kernels.triton.cache_update import decode_inputs, rope_store
from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.encoder_attention import encoder_attention
from kvasir.kernels.triton.linear import blocks_for, gemv, linear_parts, parts_for, takes, tile_linear
from kvasir.kernels.triton.paged_decode import Split, Workspace, paged_decode
from kvasir.kernels.triton.paged_prefill import paged_prefill
from kvasir.kernels.triton.pointwise import add_layer_norm, add_rms_norm, gated_activation, layer_norm, rms_norm
from kvasir.kernels.triton.shared_prefix import choose_tiling
from tests.kernel_builders import DEVICE, DTYPES, GPU, attend, close, paged, randn, share
from tests.pairwise import each_once, few, pairwise

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 192, 896])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual, gain = randn(5, width, dtype=dtype), randn(5, width, dtype=dtype), randn(width, dtype=dtype)
    close(rms_norm(x, gain, 1e-6), reference.rms_norm(x, gain, 1e-6), dtype)
    wanted, wanted_sum = reference.add_rms_norm(x, residual.clone(), gain, 1e-6)
    got, total = add_rms_norm(x, residual, gain, 1e-6)
    close(got, wanted, dtype)
    assert torch.equal(total, wanted_sum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "has_bias"), [(64, False), (384, True), (768, True), (1000, True), (1024, False)])
def test_layer_norm(width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, residual, gain = randn(5, width, dtype=dtype) + 3, randn(5, width, dtype=dtype), randn(width, dtype=dtype)
    bias = randn(width, dtype=dtype) if has_bias else None
    x[2], residual[2] = 7.0, -3.0  # no variance at all
    close(layer_norm(x, gain, bias, 1e-12), reference.layer_norm(x, gain, bias, 1e-12), dtype)
    before = residual.clone()
    close(layer_norm(x, gain, bias, 1e-5, residual), reference.layer_norm(x, gain, bias, 1e-5, before), dtype)
    assert torch.equal(residual, before), "without keep_sum the residual stays as it is"
    wanted, wanted_sum = reference.add_layer_norm(x, before, gain, bias, 1e-5)
    got, total = add_layer_norm(x, residual, gain, bias, 1e-5)
    close(got, wanted, dtype)
    assert torch.equal(total, wanted_sum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "reach", "biased", "softcap"),
    [
        (4, 4, 32, None, False, None),
        (4, 2, 24, 5, False, None),
        (2, 2, 64, None, True, None),
        (4, 1, 16, 40, True, 3.0),
    ],
)
def test_encoder_attention(
    heads: int, kv_heads: int, dim: int, reach: int | None, biased: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    lengths = np.array([70, 1, 33, 8, 8, 64], np.int32)  # 64 fills its blocks
    qkv = randn(int(lengths.sum()), heads + 2 * kv_heads, dim, dtype=dtype)
    starts = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=DEVICE)
    bias = randn(heads, 2 * 70 - 1, dtype=dtype) if biased else None
    parts = qkv.split((heads, kv_heads, kv_heads), dim=1)
    options = (starts, lengths, dim**-0.5, reach, bias, softcap)
    got, wanted = encoder_attention(*parts, *options), encoder_reference(*parts, *options)
    close(got, wanted, dtype)
    # By the definition, one query after another.
    q, k, v = (each.double().cpu() for each in parts)
    for at in (0, 69, 70, 75, 104, 119):
        which = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        first, last = int(starts[which]), int(starts[which + 1])
        keys, values = (x[first:last].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[at], keys) * dim**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(first, last) - at
        if bias is not None:
            scores += bias.double().cpu()[:, 69 + distance]
        if reach is not None:
            scores[:, distance.abs() > reach] = -torch.inf
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        close(wanted[at].cpu(), expected, dtype)


@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation(dtype: torch.dtype, kind: str) -> None:
    x = 4 * randn(3, 2 * 1500, dtype=dtype)
    x[:, :2] = torch.tensor([-90.0, 90.0])
    close(gated_activation(x, kind), reference.gated_activation(x, kind), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "norm", "way"),
    pairwise(
        [(4, 2, 32, 32), (9, 3, 64, 64), (8, 4, 80, 40)], [False, True], ["halves", "neighbours", "not"], every=GPU
    ),
)
def test_rope_store(heads: int, kv_heads: int, dim: int, rotary: int, norm: bool, way: str, dtype: torch.dtype) -> None:
    tokens, block_size = 6, 16
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    gains = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
    angles = torch.randn(50, rotary // 2, device=DEVICE)
    table = None if way == "not" else torch.cat((angles.cos(), angles.sin()), -1)
    turned = way == "neighbours"
    positions = torch.tensor([3, 0, 40, 7, 49, 1], device=DEVICE)
    slots = torch.tensor([5, 93, 17, 40, 60, 61], device=DEVICE)
    cache = torch.zeros(6, 2, block_size, kv_heads, dim, device=DEVICE, dtype=dtype)
    wanted_cache = cache.clone()
    query, key, value = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if norm:
        query, key = reference.rms_norm(query, gains[0], 1e-6), reference.rms_norm(key, gains[1], 1e-6)
    if table is not None:
        query, key = reference.rotary(query, key, positions, table, turned)
    reference.store_kv(key, value, wanted_cache, slots)
    got = rope_store(qkv, heads, positions, table, cache, slots, *gains, eps=1e-6, interleaved=turned)
    close(got, query, dtype)
    close(cache, wanted_cache, dtype)
    untouched = torch.ones(6 * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 0).all(), "another slot was touched"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "split", "window"),
    pairwise(
        [(4, 2, 32, 16), (14, 2, 64, 16), (8, 2, 80, 64), (4, 2, 32, 256)],
        [Split(1, 1 << 30), Split(8, 32)],
        [None, 50],
        every=GPU,
    ),
)
def test_paged_decode(
    heads: int, kv_heads: int, dim: int, block_size: int, split: Split, window: int | None, dtype: torch.dtype
) -> None:
    lengths = [1, 16, 17, 300, 64, 131, 0]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, block_size, dtype)
    query = randn(len(lengths), heads, dim, dtype=dtype)
    out = torch.full_like(query, 7.0)
    paged_decode(query, cache, tables, rows, lens, out, Workspace(), dim**-0.5, window, split=split)
    for i, n in enumerate(lengths[:-1]):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, window), dtype)
    assert (out[-1] == 7).all(), "a padding row was written"


@pytest.mark.parametrize("split", [Split(1, 1 << 30), Split(4, 64)])
def test_whose_turn_comes_first_changes_nothing(split: Split) -> None:
    lengths = [1, 16, 17, 300, 64, 131, 0]
    cache, tables, rows, lens = paged(lengths, 2, 32, 16, torch.float32)
    query = randn(len(lengths), 4, 32)
    order = torch.argsort(lens, descending=True).int()
    found = torch.full((2, *query.shape), 7.0, device=DEVICE)
    for out, turns in zip(found, (None, order), strict=True):
        paged_decode(query, cache, tables, rows, lens, out, Workspace(), 32**-0.5, split=split, order=turns)
    assert torch.equal(*found) and (found[0, :-1] != 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_soft_cap(window: int | None, dtype: torch.dtype) -> None:
    """A cap that most scores are well above, so that it matters."""
    lengths, chunks, dim, cap = [40, 150, 70], [1, 90, 70], 32, 0.7
    cache, tables, rows, lens = paged(lengths, 2, dim, 16, dtype)
    starts = [0, *np.cumsum(chunks).tolist()]
    query = randn(starts[-1], 4, dim, dtype=dtype) * 4
    out = torch.full_like(query, float("nan"))
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    paged_decode(query[:1], cache, tables, rows[:1], lens[:1], out[:1], Workspace(), dim**-0.5, window, cap)
    paged_prefill(query, cache, tables, rows[1:], on_device[1:], lens[1:], 90, out, dim**-0.5, window, cap)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window, cap), dtype)


@pytest.mark.parametrize("programs", [2, 99])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("parts", "rank", "tokens"), [((64, 32, 32), 8, 40), ((100,), 3, 5), ((48, 48), 80, 33), ((256,), 16, 1)], ids=str
)
def test_adapters(
    parts: tuple[int, ...], rank: int, tokens: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots with and without factors, gains and shifts; tokens without a slot; a slot with more tokens than a tile.
    Programs take several tiles each, or some find none."""
    monkeypatch.setattr(adapters, "_programs", lambda tiles, others: min(tiles, programs))
    slots, inputs, outputs = 5, 80, sum(parts)
    matrices = AdapterMatrices(
        randn(slots, len(parts) * rank, inputs, dtype=dtype) * 0.1,
        randn(slots, rank, outputs, dtype=dtype) * 0.1,
        randn(slots, outputs, dtype=torch.float32),
        randn(slots, outputs, dtype=torch.float32),
        torch.tensor([[rank, 0], [rank - 1, 1], [0, 1], [0, 0], [rank, 1]], dtype=torch.int32, device=DEVICE),
        parts,
    )
    chosen = [0, -1, 1, 2, 3, 4, -1] + [4] * 20 + [1] * 20
    asked = torch.tensor(chosen[:tokens], dtype=torch.int32, device=DEVICE)
    x, y = randn(tokens, inputs, dtype=dtype), randn(tokens, outputs, dtype=dtype)
    expected = reference.adapt(x, y.clone(), matrices, TokenSlots(asked, slots))
    close(adapt(x, y.clone(), matrices, TokenSlots(asked, slots)), expected, dtype)
    assert not torch.equal(expected, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window"),
    each_once([(4, 2, 32, 16), (8, 2, 64, 64), (4, 4, 80, 16), (4, 2, 32, 256)], [None, 20, 100], every=GPU),
)
def test_paged_prefill(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    lengths, chunks = [5, 150, 200, 131], [5, 150, 70, 1]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, block_size, dtype)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), heads, dim, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    starts_on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    paged_prefill(query, cache, tables, rows, starts_on_device, lens, max(chunks), out, dim**-0.5, window)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "size", "split", "shares"),
    pairwise(
        [(4, 2, 32, 16), (8, 2, 64, 64), (4, 2, 32, 256)],
        [None, 20],
        [64, 192],
        [(Split(1, 1 << 30), False), (Split(4, 32), True)],
        every=GPU,
    ),
)
def test_mixed_steps_of_fixed_size(
    split: Split,
    shares: bool,
    size: int,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Single tokens and chunks in a launch that knows neither."""
    lengths, chunks = [65, 150, 70, 131, 33], [1, 1, 17, 2, 33]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, block_size, dtype)
    prefixes = share(tables, rows, block_size, [(64 // block_size * block_size, [0, 1])]) if shares else None
    if prefixes is not None:
        padding = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        prefixes.tokens = torch.cat([prefixes.tokens, padding])
        prefixes.members = torch.cat([prefixes.members, padding])
    pad = 3
    rows = torch.cat([rows, torch.full((pad,), len(tables) - 1, device=DEVICE)])
    counts = torch.tensor(chunks + [0] * pad, dtype=torch.int32, device=DEVICE)
    lens = torch.cat([lens, torch.zeros(pad, dtype=torch.int32, device=DEVICE)])
    starts = np.concatenate([[0], np.cumsum(counts.cpu().numpy())])
    query = randn(size, heads, dim, dtype=dtype)
    batch = AttentionBatch(
        slots=rows, query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE), seq_lens=lens, tables=tables,
        rows=rows, num_decodes=0, query_lens=np.zeros(8, np.int32), seq_bounds=np.full(8, 2048, np.int32),
        block_size=block_size, tiles=find_tiles(counts, lens, size), shared=prefixes,
    )  # fmt: skip
    monkeypatch.setattr(paged_decode_module, "choose_split", lambda sequences, kv_heads: split)
    out = TritonAttention().forward(query, cache, batch, scale=dim**-0.5, window=window)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window), dtype)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("short", "listed"), [(2, True), (60, False)])
def test_a_long_chunk_among_short_ones(
    short: int, listed: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that differ much are a list of tiles, not a grid in which every chunk has the longest's."""
    monkeypatch.setattr(triton_attention, "ROOM", 4)
    chunks = [1, 1, 90, *[short] * 8]
    lengths = [n + 7 * i for i, n in enumerate(chunks)]
    cache, tables, rows, lens = paged(lengths, 2, 32, 16, torch.float32)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), 4, 32)
    batch = AttentionBatch(
        slots=rows, query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE), seq_lens=lens, tables=tables,
        rows=rows, num_decodes=2, query_lens=np.array(chunks, np.int32), seq_bounds=np.array(lengths, np.int32),
        block_size=16,
    )  # fmt: skip
    out = TritonAttention().forward(query, cache, batch, scale=32**-0.5, window=window)
    assert ("tiles" in batch.step_cache) is listed
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("step", ["apart", "mixed"])
def test_sinks(step: str, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score without a value takes its share of the weights once, however a sequence is cut."""
    monkeypatch.setattr(paged_decode_module, "choose_split", lambda sequences, kv_heads: Split(4, 32))
    monkeypatch.setattr(triton_attention, "ROOM", 1000 if step == "apart" else 0)
    sinks = torch.tensor([3.0, -2.0, 0.5, 6.0], device=DEVICE)
    chunks, lengths = [1, 1, 1, 9, 21], [150, 70, 7, 40, 21]
    cache, tables, rows, lens = paged(lengths, 2, 32, 16, dtype)
    shared = share(tables, rows, 16, [(64, [0, 1])])
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), 4, 32, dtype=dtype)
    batch = AttentionBatch(
        slots=rows, query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE), seq_lens=lens, tables=tables,
        rows=rows, num_decodes=3, query_lens=np.array(chunks, np.int32), seq_bounds=np.array(lengths, np.int32),
        block_size=16,
    )  # fmt: skip
    if step == "apart":
        batch.shared = replace(shared, tokens=shared.tokens[:3].clone(), members=shared.members[:3].clone())
    else:
        batch.shared = shared
    out = TritonAttention().forward(query, cache, batch, scale=32**-0.5, window=window, sinks=sinks)
    assert ("tiles" in batch.step_cache) is (step == "mixed")
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window, sinks=sinks), dtype)


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value):RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", few([50, 2500], fast=[2500], every=GPU))
def test_draw(vocab: int, dtype: torch.dtype) -> None:
    """Nothing is multiplied in 16 bits, so the interpreter takes them, too."""
    lines = 60 if GPU else 30  # the interpreter takes its time
    logits = (randn(lines, vocab) * 3).to(dtype)
    logits[5, 10:] = logits[6, : vocab // 2] = float("-inf")
    rows = torch.arange(lines, device=DEVICE) % 3
    positions = torch.arange(lines, device=DEVICE)
    temperature = torch.tensor([0.0, 0.7, 1.3], device=DEVICE)
    seeds = torch.tensor([1, -5, 77], dtype=torch.int32, device=DEVICE)
    next_token, wanted_next = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    got = draw(logits, rows, positions, temperature, seeds, next_token)
    wanted = reference.draw(logits, rows, positions, temperature, seeds, wanted_next)
    best, wanted_best = (logits.gather(1, tokens.long()[:, None])[rows == 0] for tokens in (got, wanted))
    assert torch.equal(best, wanted_best), "the best token needs no rounding; in 16 bits several may be"
    assert dtype != torch.float32 or torch.equal(got[rows == 0], wanted[rows == 0])
    drawn = rows > 0
    assert torch.equal(got[drawn], wanted[drawn])
    assert torch.isin(next_token, got).all()
    threshold = logits.float().sort(dim=-1).values[:, -7].contiguous()  # the best seven stay
    got = draw(logits, rows, positions, temperature, seeds, next_token, threshold)
    wanted = reference.draw(logits, rows, positions, temperature, seeds, wanted_next, threshold)
    assert torch.equal(got[drawn], wanted[drawn])
    assert (logits.gather(1, got.long()[:, None])[:, 0] >= threshold).all()
    logits[9:12] = logits[3, 0] = logits[16, vocab - 1] = logits[20, vocab // 2] = float("nan")
    broken = logits.isnan().any(dim=1)
    before = got
    for filtered in (None, threshold):
        got = draw(logits, rows, positions, temperature, seeds, next_token, filtered)
        assert (got[broken] == reference.NOT_A_TOKEN).all() and (got[~broken] >= 0).all()
        assert ((next_token >= 0) & (next_token < vocab)).all(), "the next step may read it before the row is ended"
    assert torch.equal(got[~broken], before[~broken]), "other lines are as they were"


def test_decode_inputs() -> None:
    rows = torch.tensor([4, 1, 7, 7, 0], device=DEVICE)  # 7 stands for padding
    computed = torch.tensor([3, 17, 0, 0, 32, 0, 0, 5], dtype=torch.int32, device=DEVICE)
    next_token = torch.arange(100, 108, dtype=torch.int32, device=DEVICE)
    tables = torch.arange(8 * 3, dtype=torch.int32, device=DEVICE).view(8, 3)
    before = computed.clone()
    lengths = torch.full((5,), 9, dtype=torch.int32, device=DEVICE)
    ids, positions, slots = decode_inputs(rows, lengths, 7, computed, next_token, tables, 16)
    assert ids.tolist() == [104, 101, 0, 0, 100]
    assert positions.tolist() == [32, 17, 0, 0, 3]
    assert slots.tolist() == [14 * 16, 4 * 16 + 1, -1, -1, 3]
    assert lengths.tolist() == [33, 18, 0, 0, 4]
    assert (computed - before).tolist() == [1, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shared", "block_size", "programs", "split"),
    each_once(
        [(16, 16, 128), (128, 16, 128), (192, 16, 5), (192, 16, 1), (256, 256, 128)],
        [Split(1, 1 << 30), Split(4, 32)],
        every=GPU,
    ),
)
def test_shared_prefix(
    shared: int, block_size: int, programs: int, split: Split, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "PROGRAMS", programs)  # in 4, 2 and 1 parts
    heads, kv_heads, dim = 8, 2, 32
    lengths = [shared + n for n in (1, 40, 100, 17, 64)]
    cache, tables, rows, lens = paged([*lengths, 0], kv_heads, dim, block_size, dtype)
    prefixes = share(tables, rows, block_size, [(shared, [0, 1, 2, 3, 4])])
    query = randn(len(lengths) + 1, heads, dim, dtype=dtype)
    out = torch.full_like(query, 7.0)
    paged_decode(query, cache, tables, rows, lens, out, Workspace(), dim**-0.5, split=split, shared=prefixes)
    for i, n in enumerate(lengths):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, None), dtype)
    assert (out[-1] == 7).all(), "a padding row was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "split"), [(8, Split(4, 32)), (6, Split(1, 1 << 30))])
def test_several_groups_share_prefixes(heads: int, split: Split, dtype: torch.dtype) -> None:
    """Sequences of two groups stand among others that share nothing; each group is more than a tile, or less."""
    kv_heads, dim, block_size = 2, 32, 16
    lengths = [50 + 7 * i for i in range(13)]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, block_size, dtype)
    shared = share(tables, rows, block_size, [(48, list(range(1, 12, 2))), (16, [4, 0, 8])])
    query = randn(len(lengths), heads, dim, dtype=dtype)
    out, workspace = torch.full_like(query, float("nan")), Workspace()
    workspace.get(10_000, dim, query.device)[0].fill_(float("nan"))  # what nobody wrote must not be merged
    workspace.lse.fill_(float("nan"))
    paged_decode(query, cache, tables, rows, lens, out, workspace, dim**-0.5, split=split, shared=shared)
    for i, n in enumerate(lengths):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, None), dtype)


def test_a_prefix_is_cut_until_the_gpu_is_full() -> None:
    """512 sequences fill an H200 with two parts, fewer with as many as there may be."""
    assert [choose_tiling(4 * n, 8).parts for n in (16, 64, 256, 512, 2048)] == [4, 4, 4, 2, 1]
    assert choose_tiling(1, 1).parts == 4


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.9.1+git12", True), ("3.10.0", False), ("4.0.0", False)]
)
def test_a_gluon_that_nobody_tried_is_left_alone(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch.triton, "__version__", version)
    launch.gluon_is_known.cache_clear()
    try:
        assert launch.gluon_is_known() is known
    finally:
        launch.gluon_is_known.cache_clear()
    assert (f"Triton {version} is newer than 3.9" in caplog.text) is not known


def test_gluon_is_imported_by_none_but_its_own_kernels() -> None:
    """A Triton whose Gluon has changed must not keep all other kernels from being imported."""
    files = sorted(Path(launch.__file__).parent.glob("*.py"))
    first = re.compile(r"^(?:from|import) .*\b(?:gluon\b|hopper_)", re.MULTILINE)
    using = {file.stem for file in files if first.search(file.read_text(encoding="utf-8"))}
    assert using == {"hopper_coded", "hopper_latent", "hopper_prefill"}


def test_small_blocks_read_a_shared_prefix_like_any_other() -> None:
    """A tile of the prefix stage is a block, and tensor cores want 16 rows."""
    cache, tables, rows, lens = paged([20, 33], 2, 32, 8, torch.float32)
    shared = share(tables, rows, 8, [(16, [0, 1])])
    query, out = randn(2, 4, 32), torch.empty(2, 4, 32, device=DEVICE)
    paged_decode(query, cache, tables, rows, lens, out, Workspace(), 32**-0.5, shared=shared)
    for i, n in enumerate((20, 33)):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, None), torch.float32)


def test_what_a_workspace_outgrew_stays() -> None:
    """Graphs that were captured with it go on writing there."""
    workspace = Workspace()
    first = [tensor.data_ptr() for tensor in workspace.get(10, 8, torch.device(DEVICE))]
    larger = [tensor.data_ptr() for tensor in workspace.get(1000, 8, torch.device(DEVICE))]
    assert not set(first) & set(larger)
    assert set(first) <= {tensor.data_ptr() for tensor in workspace._outgrown}
    assert [tensor.data_ptr() for tensor in workspace.get(500, 8, torch.device(DEVICE))] == larger


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inner", "bias"), each_once([(7, 512), (64, 1536), (200, 1024)], [False, True], every=GPU)
)
def test_gemv(outputs: int, inner: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(1, inner, dtype=dtype), randn(outputs, inner, dtype=dtype)
    added = randn(outputs, dtype=dtype) if bias else None
    assert takes(x, weight)
    wanted = reference.linear(x.double(), weight.double(), None if added is None else added.double())
    close(gemv(x, weight, added), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inner", "bias", "count"),
    each_once([(200, 256, True), (128, 384, False)], [2, 16, 37, 64, 200], every=GPU),
)
def test_tile_linear(outputs: int, inner: int, bias: bool, count: int, dtype: torch.dtype) -> None:
    if GPU and dtype is torch.float32:
        pytest.skip("tiles are for half precision")
    x, weight = randn(count, inner, dtype=dtype), randn(outputs, inner, dtype=dtype)
    added = randn(outputs, dtype=dtype) if bias else None
    wanted = reference.linear(x.double(), weight.double(), None if added is None else added.double())
    close(tile_linear(x, weight, added, [64, 128, 4, 3]), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, 64, 200])
def test_parts_are_summed_by_the_norm(count: int, dtype: torch.dtype) -> None:
    if GPU and dtype is torch.float32:
        pytest.skip("tiles are for half precision")
    x, weight = randn(count, 512, dtype=dtype), randn(96, 512, dtype=dtype)
    residual, gain = randn(count, 96, dtype=dtype), randn(96, dtype=dtype)
    parts = linear_parts(x, weight, [64, 64, 4, 3, 4])
    assert parts.shape == (4, count, 96)
    close(parts.sum(0), reference.linear(x.double(), weight.double()), dtype)
    wanted, wanted_sum = reference.add_rms_norm(parts, residual.clone(), gain, 1e-6)
    got, total = add_rms_norm(parts, residual, gain, 1e-6)
    close(got, wanted, dtype)
    close(total, wanted_sum, dtype)


def test_tiles_are_for_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = randn(20, 256, dtype=torch.float16), randn(128, 256, dtype=torch.float16)
    assert blocks_for(x, weight) is None
    monkeypatch.setattr(linear, "_measured", linear._measured.__wrapped__)  # nothing is remembered
    monkeypatch.setattr(linear, "table", lambda name: {"tile 128x256 for 32": [64, 64, 4, 3]})
    assert blocks_for(x, weight) == [64, 64, 4, 3]
    assert blocks_for(x[:16], weight) is None and blocks_for(x[:1], weight) is None
    assert blocks_for(x.float(), weight.float()) is None
    assert parts_for(x, weight) is None
    monkeypatch.setattr(linear, "table", lambda name: {"parts 128x256 for 32": [64, 64, 4, 3, 2]})
    assert parts_for(x, weight) == [64, 64, 4, 3, 2] and blocks_for(x, weight) is None


def test_the_table_of_products_is_well_formed() -> None:
    for entries in json.loads(linear.DATA.read_text()).values():
        for key, blocks in entries.items():
            assert re.fullmatch(r"gemv (plain|norm|add|gated) \d+x\d+|(tile|parts) \d+x\d+ for \d+", key), key
            assert len(blocks) == {"gemv": 3, "tile": 4, "parts": 5}[key.split()[0]] and all(
                isinstance(b, int) for b in blocks
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inner"), [(64, 512), (48, 1536), (100, 1024), (20, 704), (12, 64)])
def test_gemv_with_what_stands_around_it(outputs: int, inner: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight, gain = randn(1, inner, dtype=dtype), randn(outputs, inner, dtype=dtype), randn(inner, dtype=dtype)
    added = randn(outputs, dtype=dtype) if bias else None
    stream = randn(1, outputs, dtype=dtype)
    ways: list[dict[str, Any]] = [
        {"gain": gain, "eps": 1e-5},
        {"add": stream},
        {"gain": gain, "eps": 1e-5, "gated": True},
    ]
    for how in ways:
        wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in how.items()}
        wanted = reference.fused_linear(x.double(), weight.double(), None if added is None else added.double(), **wide)
        close(gemv(x, weight, added, **how), wanted, dtype)


def test_a_bound_is_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of single tokens alone; with what they share where a layer does not read that apart; of all once chunks are
    single tokens too."""
    bounds: list[int] = []
    monkeypatch.setattr(triton_attention, "paged_decode", lambda *args, longest, **_: bounds.append(longest))
    monkeypatch.setattr(triton_attention, "paged_prefill", lambda *args: None)
    lengths, chunks = [70, 90, 300], [1, 1, 40]
    cache, tables, rows, lens = paged(lengths, 2, 32, 16, torch.float32)
    batch = AttentionBatch(
        slots=torch.zeros(42, dtype=torch.int64, device=DEVICE), seq_lens=lens, tables=tables, rows=rows,
        query_start=torch.tensor([0, 1, 2, 42], dtype=torch.int32, device=DEVICE), num_decodes=2,
        query_lens=np.array(chunks, np.int32), seq_bounds=np.array(lengths, np.int32), block_size=16, own_bound=26,
        shared=share(tables, rows, 16, [(64, [0, 1])]),
    )  # fmt: skip
    for each, window in ((batch, None), (batch, 8), (batch.last_tokens().batch, None)):
        TritonAttention().forward(randn(len(each.slots), 4, 32), cache, each, scale=1.0, window=window)
    assert bounds == [26, 90, 300]
