"""Triton kernels against their references at shapes that a seeded generator draws: few in the interpreter, more and
larger ones on a GPU. The shapes that matter most, edges among them, are in test_triton_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvasir.kernels import reference
from kvasir.kernels.reference import MASK, gumbel_noise

pytest.importorskip("triton")

from kvasir.kernels.layout import find_tiles
from kvasir.kernels.triton.cache_update import rope_store
from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.filter_threshold import filter_threshold
from kvasir.kernels.triton.paged_decode import Split, Workspace, paged_decode
from kvasir.kernels.triton.paged_mixed import paged_mixed
from kvasir.kernels.triton.paged_prefill import paged_prefill
from kvasir.kernels.triton.pointwise import add_rms_norm, gated_activation, rms_norm
from tests.kernel_builders import DEVICE, DTYPES, GPU, attend, close, paged, randn, share

pytestmark = pytest.mark.kernel

ATTENTION = range(16 if GPU else 2)  # on a GPU nearly every shape is compiled by itself
OTHERS = range(32 if GPU else 3)
# The interpreter runs a program after the other, each in Python.
MOST_TOKENS, MOST_SEQUENCES, MOST_KV_HEADS = (3000, 40, 8) if GPU else (150, 4, 2)


def generator(kind: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *kind.encode()])


def pick(rng: np.random.Generator, *values: int) -> int:
    return int(rng.choice(values))


@dataclass(frozen=True)
class Shape:
    """Of attention."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None
    softcap: float | None
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Shape:
        kv_heads = int(rng.integers(1, MOST_KV_HEADS + 1))
        return cls(
            heads=kv_heads * int(rng.integers(1, 9)),
            kv_heads=kv_heads,
            dim=pick(rng, 16, 32, 64, 80, 96, 128),
            block_size=pick(rng, 16, 32, 64, 128),
            window=int(rng.integers(1, MOST_TOKENS)) if rng.random() < 0.3 else None,
            softcap=float(rng.uniform(0.5, 5)) if rng.random() < 0.3 else None,
            dtype=DTYPES[int(rng.integers(len(DTYPES)))],
        )


@pytest.mark.parametrize("seed", ATTENTION)
def test_decode(seed: int) -> None:
    rng = generator("decode", seed)
    shape = Shape.draw(rng)
    lengths = rng.integers(0, MOST_TOKENS + 1, int(rng.integers(1, MOST_SEQUENCES + 1))).tolist()  # 0: padding
    lengths[0] += 1
    split = None if rng.random() < 0.3 else Split(pick(rng, 1, 2, 4, 8, 16), pick(rng, 16, 32, 64, 256))
    cache, tables, rows, lens = paged(lengths, shape.kv_heads, shape.dim, shape.block_size, shape.dtype)
    query = randn(len(lengths), shape.heads, shape.dim, dtype=shape.dtype)
    out = torch.full_like(query, 7.0)
    order = torch.argsort(lens, descending=True).int() if rng.random() < 0.5 else None
    paged_decode(
        query, cache, tables, rows, lens, out, Workspace(), shape.scale, shape.window, shape.softcap, split=split,
        order=order,
    )  # fmt: skip
    for i, n in enumerate(lengths):
        if n:
            wanted = attend(query[i : i + 1], cache, tables[rows[i]], n, shape.window, shape.softcap)
            close(out[i : i + 1], wanted, shape.dtype)
        else:
            assert (out[i] == 7).all(), "a padding row was written"


@pytest.mark.parametrize("seed", ATTENTION)
def test_prefill(seed: int) -> None:
    rng = generator("prefill", seed)
    shape = Shape.draw(rng)
    chunks = rng.integers(2, MOST_TOKENS // 2, int(rng.integers(1, min(MOST_SEQUENCES, 6) + 1)))
    before = rng.integers(0, MOST_TOKENS // 2, len(chunks)) * (rng.random(len(chunks)) < 0.7)
    lengths = (chunks + before).tolist()
    cache, tables, rows, lens = paged(lengths, shape.kv_heads, shape.dim, shape.block_size, shape.dtype)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), shape.heads, shape.dim, dtype=shape.dtype)
    out = torch.full_like(query, float("nan"))
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    how = (shape.scale, shape.window, shape.softcap)
    paged_prefill(query, cache, tables, rows, on_device, lens, int(chunks.max()), out, *how)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, shape.window, shape.softcap), shape.dtype)


@pytest.mark.parametrize("seed", ATTENTION)
def test_mixed(seed: int) -> None:
    """Single tokens, of which some may share a prefix, and chunks, padded with rows and tokens that are nobody's."""
    rng = generator("mixed", seed)
    shape = Shape.draw(rng)
    singles, many = int(rng.integers(0, MOST_SEQUENCES)), int(rng.integers(1, 5))
    chunks = np.concatenate([np.ones(singles, np.int64), rng.integers(2, MOST_TOKENS // 3, many)])
    lengths = (chunks + rng.integers(shape.block_size, MOST_TOKENS // 2 + shape.block_size, len(chunks))).tolist()
    pad = int(rng.integers(0, 4))
    cache, tables, rows, lens = paged(lengths + [0] * pad, shape.kv_heads, shape.dim, shape.block_size, shape.dtype)
    shared = share(tables, rows, shape.block_size, [(shape.block_size, list(range(0, singles, 2)))] if singles else [])
    counts = torch.tensor([*chunks, *[0] * pad], dtype=torch.int32, device=DEVICE)
    starts = np.concatenate([[0], np.cumsum(counts.cpu().numpy())])
    query = randn(int(starts[-1]) + max(pad, len(rows) - int(starts[-1])), shape.heads, shape.dim, dtype=shape.dtype)
    out = torch.full_like(query, 7.0)
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    split = None if rng.random() < 0.5 else Split(pick(rng, 1, 4), pick(rng, 32, 1 << 20))
    paged_mixed(
        query, cache, tables, rows, on_device, lens, find_tiles(counts, lens, len(query)), out, Workspace(),
        shape.scale, shape.window, shape.softcap, split=split, shared=shared if rng.random() < 0.5 else None,
    )  # fmt: skip
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, shape.window, shape.softcap), shape.dtype)
    assert (out[starts[-1] :] == 7).all(), "a token of nobody's was written"


@pytest.mark.parametrize("seed", ATTENTION)
def test_shared_prefix(seed: int) -> None:
    rng = generator("prefix", seed)
    shape = Shape.draw(rng)
    blocks = int(rng.integers(1, 1 + max(1, MOST_TOKENS // 2 // shape.block_size)))
    shared = blocks * shape.block_size
    own = rng.integers(1, MOST_TOKENS // 2, int(rng.integers(2, MOST_SEQUENCES + 1)))
    lengths = (shared + own).tolist()
    cache, tables, rows, lens = paged(lengths, shape.kv_heads, shape.dim, shape.block_size, shape.dtype)
    order = rng.permutation(len(lengths)).tolist()  # two groups, and some in none
    first, second = sorted(int(x) for x in rng.integers(1, len(lengths) + 1, 2))
    groups = [(shared, order[:first])] + ([(shape.block_size, order[first:second])] if second > first else [])
    prefixes = share(tables, rows, shape.block_size, groups)
    query = randn(len(lengths), shape.heads, shape.dim, dtype=shape.dtype)
    out = torch.full_like(query, float("nan"))
    split = None if rng.random() < 0.5 else Split(pick(rng, 1, 4), pick(rng, 32, 1 << 20))
    paged_decode(query, cache, tables, rows, lens, out, Workspace(), shape.scale, split=split, shared=prefixes)
    for i, n in enumerate(lengths):
        close(out[i : i + 1], attend(query[i : i + 1], cache, tables[rows[i]], n, None), shape.dtype)


@pytest.mark.parametrize("seed", OTHERS)
def test_rope_store(seed: int) -> None:
    rng = generator("store", seed)
    shape = Shape.draw(rng)
    tokens, dim, kv_heads = int(rng.integers(1, 20)), shape.dim, shape.kv_heads
    qkv = randn(tokens, (shape.heads + 2 * kv_heads) * dim, dtype=shape.dtype)
    norm, interleaved = bool(rng.random() < 0.5), bool(rng.random() < 0.3)
    gains = (randn(dim, dtype=shape.dtype), randn(dim, dtype=shape.dtype)) if norm else (None, None)
    angles = torch.randn(500, int(rng.integers(1, dim // 2 + 1)), device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1) if rng.random() < 0.8 else None
    positions = torch.tensor(rng.integers(0, 500, tokens), device=DEVICE)
    cache = torch.zeros(5, 2, shape.block_size, kv_heads, dim, device=DEVICE, dtype=shape.dtype)
    wanted = cache.clone()
    slots = torch.tensor(rng.permutation(5 * shape.block_size)[:tokens], device=DEVICE)
    slots[torch.tensor(rng.random(tokens) < 0.2, device=DEVICE)] = -1  # stored nowhere
    query, key, value = qkv.view(tokens, -1, dim).split((shape.heads, kv_heads, kv_heads), 1)
    if norm:
        query, key = (reference.rms_norm(x, gain, 1e-6) for x, gain in zip((query, key), gains, strict=True))
    if table is not None:
        query, key = reference.rotary(query, key, positions, table, interleaved)
    stored = slots >= 0
    reference.store_kv(key[stored], value[stored], wanted, slots[stored])
    got = rope_store(qkv, shape.heads, positions, table, cache, slots, *gains, eps=1e-6, interleaved=interleaved)
    close(got, query, shape.dtype)
    assert torch.equal((cache != 0).any(-1), (wanted != 0).any(-1)), "another slot was touched"
    if stored.any():
        close(cache, wanted, shape.dtype)


@pytest.mark.parametrize("seed", OTHERS)
def test_norm(seed: int) -> None:
    rng = generator("norm", seed)
    rows, width, parts = int(rng.integers(1, 40)), int(rng.integers(1, 9000)), pick(rng, 1, 2, 4, 8)
    dtype, eps = DTYPES[int(rng.integers(len(DTYPES)))], float(10 ** rng.uniform(-7, -3))
    x, residual, gain = (randn(*size, dtype=dtype) for size in ((rows, width), (rows, width), (width,)))
    close(rms_norm(x, gain, eps), reference.rms_norm(x, gain, eps), dtype)
    added = x if parts == 1 else randn(parts, rows, width)  # sums of parts are left in float32
    wanted, wanted_sum = reference.add_rms_norm(added, residual.clone(), gain, eps)
    got, total = add_rms_norm(added, residual, gain, eps)
    close(got, wanted, dtype)
    close(total, wanted_sum, dtype)


@pytest.mark.parametrize("seed", OTHERS)
def test_gated(seed: int) -> None:
    rng = generator("gated", seed)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    x = randn(int(rng.integers(1, 30)), 2 * int(rng.integers(1, 6000)), dtype=dtype) * float(rng.uniform(0.1, 8))
    close(gated_activation(x, "silu"), reference.gated_activation(x, "silu"), dtype)


@pytest.mark.parametrize("seed", OTHERS)
def test_sampling(seed: int) -> None:
    """Filters, then a draw. Nothing is multiplied, so the interpreter takes all kinds of floats."""
    rng = generator("sampling", seed)
    lines, vocab = int(rng.integers(1, 30)), int(rng.integers(2, 150_000 if GPU else 2500))
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
    logits = randn(lines, vocab, dtype=dtype) * float(rng.uniform(0.5, 6))
    rows = torch.tensor(rng.permutation(lines + 3)[:lines], device=DEVICE)
    heat = torch.tensor(rng.uniform(0.2, 2, lines + 3) * (rng.random(lines + 3) < 0.7), device=DEVICE).float()
    top_k = torch.tensor(rng.integers(1, vocab + 1, lines + 3) * (rng.random(lines + 3) < 0.5), device=DEVICE).int()
    top_p = torch.tensor(rng.uniform(0.3, 1, lines + 3), device=DEVICE).float()
    threshold = filter_threshold(logits, rows, heat, torch.zeros_like(heat), top_k, top_p)
    wanted_threshold = reference.filter_threshold(logits, rows, heat, torch.zeros_like(heat), top_k, top_p)
    drawn = heat[rows] > 0  # what a line keeps that draws nothing makes no difference, nor do tokens too light to draw
    possible = logits.float() > (logits.float().amax(1) - 130 * heat[rows])[:, None]
    kept, wanted_kept = ((possible & (logits >= f[:, None])).sum(1) for f in (threshold, wanted_threshold))
    ties = torch.stack([line.unique(return_counts=True)[1].max() for line in logits])
    assert ((kept - wanted_kept).abs() <= ties + wanted_kept // 1000)[drawn].all()
    positions = torch.tensor(rng.integers(0, 100_000, lines), device=DEVICE)
    seeds = torch.tensor(rng.integers(-(2**31), 2**31, lines + 3), device=DEVICE).int()
    next_token = torch.zeros(lines + 3, dtype=torch.int32, device=DEVICE)
    got = draw(logits, rows, positions, heat, seeds, next_token, threshold)
    chosen = logits.gather(1, got.long()[:, None])[:, 0]
    assert torch.equal(chosen[~drawn], logits.amax(1)[~drawn]), (
        "the best token needs no rounding; equal ones are as good"
    )
    assert (chosen >= threshold).all() and torch.equal(next_token[rows], got)
    # In float64 no token is better, but for rounding.
    noise = gumbel_noise(seeds[rows].long() & MASK, positions.long(), logits.shape[1])
    noisy = logits.double().masked_fill(logits < threshold[:, None], -torch.inf) + heat[rows, None].double() * noise
    score = noisy.gather(1, got.long()[:, None])[:, 0]
    assert (score >= noisy.amax(1) - 1e-5 * (1 + heat[rows] + logits.abs().amax(1).double()))[drawn].all()
