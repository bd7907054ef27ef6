"""Paged attention of one query token per sequence, the heads of a KV group packed into one tile.

Lengths and block tables are read from device memory, so that a launch is the same for every step and can sit in a CUDA
graph. Each sequence is cut into at most SPLITS parts of its own length (at least `min_split` tokens each), so that the
grid never depends on the longest context; a sequence of one part writes its output directly, the others are merged.
Where all sequences share a prefix, shared_prefix.py has attended it and only what follows is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early
from kvasir.kernels.triton.shared_prefix import attend_prefix, choose_tiling

LOG2E = 1.4426950408889634
SHORT = 512  # tokens: with more, reading further ahead is worth the shared memory


@triton.jit
def _part_length(span, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N, MIN_SPLIT)


@triton.jit
def _first_key(length, prefix_ptr, WINDOW: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a sequence's keys begin: at 0, after the shared prefix, or at the tile that holds the window's first."""
    first = 0
    if EXTRA > 0:
        first = tl.minimum(tl.load(prefix_ptr), length)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), where s and the result are in units of log2(e)."""
    return CAP * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(s * (2.0 / CAP)) + 1.0))


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "length_ptr", "order_ptr", "prefix_ptr"])
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, order_ptr, prefix_ptr, out_ptr, part_ptr, lse_ptr, scale,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, EXTRA: tl.constexpr, ORDERED: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    kv_head = tl.program_id(0)  # fastest: the heads of one token lie side by side in memory
    seq = tl.program_id(1)
    if ORDERED:
        seq = tl.load(order_ptr + seq)
    part = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(length_ptr + seq)
    origin = _first_key(length, prefix_ptr, WINDOW, EXTRA, BLOCK_N)
    size = _part_length(length - origin, SPLITS, MIN_SPLIT, BLOCK_N)
    start = origin + part * size
    if start >= length:  # padding rows have length 0; they and unused parts cost about half a nanosecond
        return
    end = tl.minimum(start + size, length)
    g = tl.arange(0, TILE)  # the group, padded to the rows of a tensor-core tile
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK_N)
    head = seq.to(tl.int64) * HEADS + kv_head * GROUP + g
    used = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + d[None, :], mask=used, other=0.0)
    acc = tl.zeros([TILE, PADDED], tl.float32)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        token = first + n
        valid = token < end
        if WINDOW > 0:  # blocks left of the window may be another request's by now
            valid = valid & (token >= length - WINDOW)
        block = tl.load(table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
        mask = valid[:, None] & (d < DIM)[None, :]
        k = tl.load(cache_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(cache_ptr + value_stride + at[:, None] + d[None, :], mask=mask, other=0.0)
        k = k.to(q.dtype)  # the cache may hold 8-bit floats
        v = v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            s = soft_cap(s, SOFTCAP)
        s = tl.where(valid[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    acc = acc / total[:, None]
    if EXTRA == 0 and size >= length - origin:
        tl.store(out_ptr + head[:, None] * DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        slot = head * (EXTRA + SPLITS) + EXTRA + part
        tl.store(part_ptr + slot[:, None] * DIM + d[None, :], acc, mask=used)
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=g < GROUP)


@triton.jit(do_not_specialize_on_alignment=["length_ptr", "prefix_ptr"])
def _merge_kernel(
    part_ptr, lse_ptr, length_ptr, prefix_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, WINDOW: tl.constexpr, EXTRA: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts weighted by their log-sum-exp, all of a head as one tile of SLOTS (a power of two)."""
    await_previous(PDL)
    head = tl.program_id(0)
    seq = tl.program_id(1)
    length = tl.load(length_ptr + seq)
    span = length - _first_key(length, prefix_ptr, WINDOW, EXTRA, BLOCK_N)
    count = tl.cdiv(span, _part_length(span, SPLITS, MIN_SPLIT, BLOCK_N)) + EXTRA
    if (count < 2 and EXTRA == 0) or length == 0:  # written directly, or a padding row
        return
    d = tl.arange(0, PADDED)
    j = tl.arange(0, SLOTS)
    line = (seq * HEADS + head).to(tl.int64)
    row = line * (EXTRA + SPLITS)
    lse = tl.load(lse_ptr + row + j, mask=j < count, other=-float("inf"))
    mask = (j < count)[:, None] & (d < DIM)[None, :]
    x = tl.load(part_ptr + (row + j)[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    out = tl.sum(x * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + line * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True, slots=True)
class Split:
    """Into how many parts a sequence is cut at most, and how long a part is at least."""

    count: int
    least: int

    def __post_init__(self) -> None:
        assert self.count * self.least < 1 << 31, "the kernels count tokens in 32 bits"


def choose_split(sequences: int, kv_heads: int) -> Split:
    """From measurements on an H200: few programs want many parts; many want parts only for outliers."""
    programs = sequences * kv_heads
    if programs <= 16:
        return Split(32, 64)
    if programs <= 64:
        return Split(32, 256)
    if programs <= 512:
        return Split(16, 512)
    return Split(8 if programs <= 2048 else 4, 2048)


NO_SPLIT = Split(1, 1 << 30)


def order_pays(sequences: int) -> bool:
    """Whether beginning with the longest makes a step's end shorter. On an H200, a layer of 96 sequences of 800 to 1700
    tokens takes 118 us, not 137; up to 64 sequences, which are cut into parts, it gains a percent and costs as much."""
    return sequences > 64


class Workspace:
    """Memory for partial results, shared by all layers of a model and grown when a larger step comes.

    What was outgrown is kept: graphs that were captured with it go on writing there. Each is at least twice as large as
    the one before, so that all together are less than twice the last."""

    def __init__(self) -> None:
        self.part = self.lse = torch.empty(0)
        self._outgrown: list[torch.Tensor] = []

    def get(self, slots: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self.lse.numel() < slots or self.part.numel() < slots * dim:
            self._outgrown += [self.part, self.lse]
            slots = max(slots, 2 * self.lse.numel())
            self.part = torch.empty(max(slots * dim, self.part.numel()), dtype=torch.float32, device=device)
            self.lse = torch.empty(slots, dtype=torch.float32, device=device)
        return self.part, self.lse


def paged_decode(
    query: torch.Tensor,  # [sequences, heads, head_dim], contiguous
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim]
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [sequences]: the row of `tables` that belongs to each
    lengths: torch.Tensor,  # [sequences] int32; 0: a padding row, whose output is left as it is
    out: torch.Tensor,  # like query
    workspace: Workspace,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    split: Split | None = None,
    longest: int | None = None,  # no sequence has more tokens, the prefix not counted; None: not known
    prefix: torch.Tensor | None = None,  # [1] int32: so many tokens are the same blocks for all sequences
    order: torch.Tensor | None = None,  # [sequences] int32: whose turn comes first; None: as they stand
) -> None:
    sequences, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    split = split or choose_split(sequences, kv_heads)
    if longest is not None and longest <= split.least:
        split = NO_SPLIT
    short = longest is not None and longest <= SHORT
    reads_prefix = prefix is not None and window is None and softcap is None and block_size >= 16  # a tile is a block
    tiling = choose_tiling(sequences * (heads // kv_heads), kv_heads)
    extra = tiling.parts if reads_prefix else 0
    slots = extra + split.count
    part, lse = workspace.get(sequences * heads * slots, dim, query.device)
    if prefix is not None and extra:
        attend_prefix(query, kv_cache, tables, rows, prefix, part, lse, slots, scale, tiling)
    few = sequences * kv_heads <= 16  # latency, not bandwidth
    block_n, warps, stages = (32, 4, 4) if few else (64, 2, 3 if short and sequences * kv_heads < 1024 else 5)
    shape = dict(
        HEADS=heads, DIM=dim, PADDED=triton.next_power_of_2(dim), BLOCK_N=block_n, SPLITS=split.count,
        MIN_SPLIT=split.least, WINDOW=window or 0, EXTRA=extra, **early(query),
    )  # fmt: skip
    after = lengths if prefix is None else prefix
    _decode_kernel[(kv_heads, sequences, split.count)](
        query, kv_cache, tables, rows, lengths, lengths if order is None else order, after, out, part, lse,
        scale * LOG2E,
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        KV_HEADS=kv_heads, TILE=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_SIZE=block_size,
        ORDERED=order is not None, SOFTCAP=softcap or 0.0, STAGES=stages, num_warps=warps, num_stages=stages, **shape,
    )  # fmt: skip
    if slots > 1:
        _merge_kernel[(heads, sequences)](
            part, lse, lengths, after, out, SLOTS=triton.next_power_of_2(slots), num_warps=1, **shape
        )
