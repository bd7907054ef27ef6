"""Triton kernels that write and read a KV cache of 8-bit floats: in Triton's interpreter, or on a GPU for real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.attention.torch import TorchAttention
from kvasir.kernels import reference
from kvasir.kernels.layout import find_tiles

pytest.importorskip("triton")

from kvasir.attention.triton import TritonAttention
from kvasir.kernels.triton.cache_update import rope_store
from kvasir.kernels.triton.paged_decode import Split, Workspace, paged_decode
from kvasir.kernels.triton.paged_prefill import paged_prefill
from tests.kernel_builders import DEVICE, DTYPES, GPU, attend, close, paged, randn, share
from tests.pairwise import each_once

pytestmark = pytest.mark.kernel

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]
SOME = KINDS if GPU else KINDS[:1]  # the interpreter takes its time
SHAPES = [(4, 2, 32, 16), (8, 2, 64, 64)]  # heads, key heads, head size, block size


def paged_bytes(
    lengths: list[int], kv_heads: int, dim: int, block_size: int, kind: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """See `paged`; the cache, and the same numbers in float32."""
    cache, *rest = paged(lengths, kv_heads, dim, block_size, torch.float32)
    cache = cache.to(kind)
    return cache, cache.float(), *rest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_store(kind: torch.dtype, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, block_size = 4, 2, 32, 16
    qkv = randn(6, (heads + 2 * kv_heads) * dim) * 300
    if not GPU:  # the interpreter rounds wrongly, so it is given what needs no rounding
        qkv = qkv.clamp(-400, 400).to(kind).float()
        qkv[0, heads * dim] = 1e6
    qkv = qkv.to(dtype)
    slots = torch.tensor([5, 93, 17, 40, 60, -1], device=DEVICE)
    positions = torch.arange(6, device=DEVICE)
    caches = [torch.zeros(6, 2, block_size, kv_heads, dim, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    rest = (None, None, 0.0, False, 0.5, 2.0)
    rope_store(qkv, heads, positions, None, caches[0].view(kind), slots, *rest)
    reference.rope_store(qkv[:5], heads, positions[:5], None, caches[1].view(kind), slots[:5], *rest)
    got, wanted = (cache.view(kind).float() for cache in caches)
    assert (got != wanted).float().mean() < 1e-3
    torch.testing.assert_close(got, wanted, rtol=0.26, atol=1e-4)  # a step of the type, where a division is rounded
    assert wanted.max() == torch.finfo(kind).max or kind is torch.float8_e5m2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SOME, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "cap"),
    each_once(SHAPES, [(None, None), (50, 0.7)], every=GPU),
)
def test_decode(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, cap: float | None, kind: Any, dtype: Any
) -> None:
    lengths = [1, 17, 300, 64, 0]
    cache, wide, tables, rows, lens = paged_bytes(lengths, kv_heads, dim, block_size, kind)
    query = randn(len(lengths), heads, dim, dtype=dtype)
    for split in (None, Split(4, 64)):
        out = torch.full_like(query, 7.0)
        paged_decode(query, cache, tables, rows, lens, out, Workspace(), dim**-0.5, window, cap, split=split)
        for i, n in enumerate(lengths[:-1]):
            close(out[i : i + 1], attend(query[i : i + 1], wide, tables[rows[i]], n, window, cap), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SOME, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "cap"),
    each_once([*SHAPES, (4, 2, 128, 64)], [(None, None), (20, 0.7)], every=GPU),
)
def test_prefill(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, cap: float | None, kind: Any, dtype: Any
) -> None:
    """Blocks of 64 are read through a tensor descriptor on a GPU."""
    lengths, chunks = [5, 200, 131], [5, 70, 1]
    cache, wide, tables, rows, lens = paged_bytes(lengths, kv_heads, dim, block_size, kind)
    starts = [0, *np.cumsum(chunks).tolist()]
    query = randn(starts[-1], heads, dim, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    paged_prefill(query, cache, tables, rows, on_device, lens, max(chunks), out, dim**-0.5, window, cap)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], wide, tables[rows[i]], n, window, cap), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shared_prefix(kind: torch.dtype, dtype: torch.dtype) -> None:
    shared, block_size, dim = 128, 16, 32
    lengths = [shared + n for n in (1, 40, 17)]
    cache, wide, tables, rows, lens = paged_bytes(lengths, 2, dim, block_size, kind)
    prefixes = share(tables, rows, block_size, [(shared, [0, 1, 2])])
    query = randn(len(lengths), 8, dim, dtype=dtype)
    out = torch.empty_like(query)
    paged_decode(query, cache, tables, rows, lens, out, Workspace(), dim**-0.5, shared=prefixes)
    for i, n in enumerate(lengths):
        close(out[i : i + 1], attend(query[i : i + 1], wide, tables[rows[i]], n, None), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_backends_in_a_mixed_step(kind: torch.dtype, dtype: torch.dtype) -> None:
    lengths, chunks, dim, block_size = [5, 150, 70, 131], [1, 1, 17, 33], 64, 64
    cache, wide, tables, rows, lens = paged_bytes(lengths, 2, dim, block_size, kind)
    counts = torch.tensor(chunks, dtype=torch.int32, device=DEVICE)
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), 4, dim, dtype=dtype)
    known = AttentionBatch(
        slots=rows, query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE), seq_lens=lens, tables=tables,
        rows=rows, num_decodes=2, query_lens=np.array(chunks, np.int32), seq_bounds=np.array(lengths, np.int32),
        block_size=block_size,
    )  # fmt: skip
    tiled = replace(known, tiles=find_tiles(counts, lens, int(starts[-1])), seq_bounds=np.full(4, 2048, np.int32))
    for backend, batch in ((TorchAttention(), known), (TritonAttention(), known), (TritonAttention(), tiled)):
        out = backend.forward(query, cache, batch, scale=dim**-0.5, window=None)
        for i, n in enumerate(lengths):
            part = slice(starts[i], starts[i + 1])
            close(out[part], attend(query[part], wide, tables[rows[i]], n, None), dtype)
