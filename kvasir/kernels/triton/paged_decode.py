"""Paged attention of one query token per sequence, the heads of a KV group packed into one tile.

Lengths and block tables are read from device memory, so that a launch is the same for every step and can sit in a CUDA
graph. Each sequence is cut into parts of its own length (at most 2**log_splits, of at least `least` tokens), so that
the grid never depends on the longest context; a sequence of one part writes its output directly, the others are merged
by a second launch. (Were they merged by the part that ends last, b1 of 1100 tokens would take 7.8 us a layer on an
H200, not 6.2.)
Where sequences share a prefix, shared_prefix.py has attended it and only what follows is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import SharedPrefixes
from kvasir.kernels.triton.launch import await_previous, early, next_power_of_2, padded_dim
from kvasir.kernels.triton.shared_prefix import attend_prefixes, choose_tiling

LOG2E = 1.4426950408889634
SHORT = 512  # tokens; for longer sequences, reading further ahead is worth the shared memory


@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), where s and the result are in units of log2(e)."""
    return CAP * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(s * (2.0 / CAP)) + 1.0))


@triton.jit
def first_keys(
    length, shared_ptr, WINDOW: tl.constexpr, SHARES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Number of keys of a sequence in a shared prefix, and where the others begin: after it, or at the tile that holds
    the window's first key."""
    shared = 0
    if SHARES:
        WHOLE: tl.constexpr = BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else 16
        shared = tl.multiple_of(tl.load(shared_ptr, cache_modifier=".cg"), WHOLE)
    origin = shared
    if WINDOW > 0:
        origin = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N
    return shared, origin


@triton.jit
def part_length(span, log_splits, least, BLOCK_N: tl.constexpr):
    """Length of a part: always whole tiles, so that the compiler knows where they lie within blocks."""
    each = (span + (1 << log_splits) - 1) >> log_splits
    return tl.cdiv(tl.maximum(each, least), BLOCK_N) * BLOCK_N


@triton.jit
def find_part(
    length, part, shared_ptr, log_splits, least,
    WINDOW: tl.constexpr, SHARES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys of a part, and whether its queries see no others. Padding rows have length 0. They, and parts that a
    short sequence does not have, begin at its end or later, and cost about half a nanosecond."""
    shared, origin = first_keys(length, shared_ptr, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N)
    size = part_length(length - origin, log_splits, least, BLOCK_N)
    start = origin + part * size
    return start, tl.minimum(start + size, length), (shared == 0) & (size >= length - origin)


@triton.jit
def attend_part(
    q_ptr, cache_ptr, table, sink_ptr, out_ptr, part_ptr, lse_ptr, scale, log_splits, extra,
    block_stride, value_stride, token_stride, head_stride, kv_head, seq, part, length, start, end, is_whole,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of one sequence, for the heads of one KV group."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, TILE)  # the group, padded to the rows of a tensor-core tile
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK_N)
    head = seq.to(tl.int64) * HEADS + kv_head * GROUP + g
    used = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + d[None, :], mask=used, other=0.0)
    acc = tl.zeros([TILE, PADDED], tl.float32)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
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
    if sink_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled, and what follows is not
        if is_whole:  # otherwise it is added where the parts are merged
            sink = tl.load(sink_ptr + kv_head * GROUP + g, mask=g < GROUP, other=0.0) * 1.4426950408889634
            total += tl.exp2(sink - top)
    acc = acc / total[:, None]
    if is_whole:
        tl.store(out_ptr + head[:, None] * DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=used)
    else:
        slot = head * (extra + (1 << log_splits)) + extra + part
        tl.store(part_ptr + slot[:, None] * DIM + d[None, :], acc, mask=used)
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=g < GROUP)


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra"],
    do_not_specialize_on_alignment=["row_ptr", "length_ptr", "order_ptr", "shared_ptr"],
)
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, order_ptr, shared_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr,
    scale, log_splits, least, extra, table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SHARES: tl.constexpr,
    ORDERED: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # fastest: the heads of one token lie side by side in memory
    seq = tl.program_id(1)
    if ORDERED:
        seq = tl.load(order_ptr + seq, cache_modifier=".cg")
    part = tl.program_id(2)
    length = tl.load(length_ptr + seq, cache_modifier=".cg")
    table = table_ptr + tl.load(row_ptr + seq, cache_modifier=".cg").to(tl.int64) * table_stride
    start, end, is_whole = find_part(
        length, part, shared_ptr + seq, log_splits, least, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N
    )
    await_previous(PDL)
    if start >= length:
        return
    attend_part(
        q_ptr, cache_ptr, table, sink_ptr, out_ptr, part_ptr, lse_ptr, scale, log_splits, extra,
        block_stride, value_stride, token_stride, head_stride, kv_head, seq, part, length, start, end, is_whole,
        HEADS, KV_HEADS, DIM, PADDED, TILE, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, STAGES,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra"], do_not_specialize_on_alignment=["length_ptr", "shared_ptr"]
)
def _merge_kernel(
    part_ptr, lse_ptr, length_ptr, shared_ptr, sink_ptr, out_ptr, log_splits, least, extra,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SHARES: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    seq = tl.program_id(1)
    length = tl.load(length_ptr + seq, cache_modifier=".cg")
    shared, origin = first_keys(length, shared_ptr + seq, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N)
    own = tl.cdiv(length - origin, part_length(length - origin, log_splits, least, BLOCK_N))
    await_previous(PDL)
    if (length == 0) | ((shared == 0) & (own == 1)):  # a padding row, or written directly
        return
    merge_parts(
        part_ptr, lse_ptr, sink_ptr, out_ptr, log_splits, extra, seq, head, shared, own, HEADS, DIM, PADDED, SLOTS
    )


@triton.jit
def merge_parts(
    part_ptr, lse_ptr, sink_ptr, out_ptr, log_splits, extra, seq, head, shared, own,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Parts weighted by their log-sum-exp, all of a head as one tile of SLOTS (a power of two)."""
    d = tl.arange(0, PADDED)
    j = tl.arange(0, SLOTS)
    there = (j < extra + own) & ((j >= extra) | (shared > 0))
    line = (seq * HEADS + head).to(tl.int64)
    slot = line * (extra + (1 << log_splits)) + j
    lse = tl.load(lse_ptr + slot, mask=there, other=-float("inf"))
    x = tl.load(part_ptr + slot[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, 0)
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head) * 1.4426950408889634 - top)
    out = tl.sum(x * weight[:, None], 0) / total
    tl.store(out_ptr + line * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True, slots=True)
class Split:
    """The maximum number of parts of a sequence, and the minimum length of a part."""

    count: int
    least: int

    def __post_init__(self) -> None:
        assert self.count.bit_count() == 1, "the kernels divide by it, which takes a while"
        assert self.count * self.least < 1 << 31, "the kernels count tokens in 32 bits"


def choose_split(sequences: int, kv_heads: int) -> Split:
    """Measured on an H200: few programs need many parts; many programs need parts only for outliers."""
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
    """Whether starting with the longest sequences shortens the end of a step. On an H200, a layer of 96 sequences of
    800 to 1700 tokens takes 118 us, not 137; up to 64 sequences, which are cut into parts, it gains a percent and costs
    as much."""
    return sequences > 64


class Workspace:
    """Memory for partial results, shared by all layers of a model. It grows when a larger step comes.

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


@dataclass(slots=True)
class Parts:
    """How a launch cuts its sequences, and where their partial results lie."""

    split: Split
    extra: int  # results of each head that come from a shared prefix
    shared: torch.Tensor | None  # see SharedPrefixes.tokens
    part: torch.Tensor
    lse: torch.Tensor

    @property
    def numbers(self) -> tuple[int, int, int]:
        """log_splits, least and extra, of the kernels' arguments."""
        return self.split.count.bit_length() - 1, self.split.least, self.extra

    def merge(
        self, lengths: torch.Tensor, out: torch.Tensor, shape: dict[str, Any], sinks: torch.Tensor | None
    ) -> None:
        """Called when all parts are there; `shape` is what `attend_part` was given."""
        slots = self.extra + self.split.count
        if slots == 1:
            return
        shape = {name: shape[name] for name in ("HEADS", "DIM", "PADDED", "BLOCK_SIZE", "BLOCK_N", "WINDOW", "SHARES")}
        _merge_kernel[(out.shape[1], len(lengths))](
            self.part, self.lse, lengths, lengths if self.shared is None else self.shared, sinks, out, *self.numbers,
            SLOTS=next_power_of_2(slots), num_warps=1 if shape["PADDED"] <= 256 else 8, **shape, **early(out),
        )  # fmt: skip


def reads_prefixes(kv_cache: torch.Tensor, window: int | None, softcap: float | None) -> bool:
    """Whether such a layer attends shared prefixes in a first stage. A tile of it is a block, or less."""
    return window is None and softcap is None and kv_cache.shape[2] >= 16


def attend_shared(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    workspace: Workspace,
    scale: float,
    window: int | None,
    softcap: float | None,
    split: Split | None,
    longest: int | None,
    shared: SharedPrefixes | None,
) -> Parts:
    """Attend shared prefixes, if there are any; returns how the second stage continues."""
    sequences, heads, dim = query.shape
    kv_heads = kv_cache.shape[3]
    split = split or choose_split(sequences, kv_heads)
    if longest is not None and longest <= split.least:
        split = NO_SPLIT
    if not reads_prefixes(kv_cache, window, softcap):
        shared = None
    tiling = choose_tiling(sequences * (heads // kv_heads), kv_heads)
    extra = 0 if shared is None else tiling.parts
    slots = extra + split.count
    part, lse = workspace.get(sequences * heads * slots, dim, query.device)
    if shared is not None:
        attend_prefixes(query, kv_cache, tables, rows, shared, part, lse, slots, scale, tiling)
    return Parts(split, extra, None if shared is None else shared.tokens, part, lse)


def part_shape(
    query: torch.Tensor, kv_cache: torch.Tensor, window: int | None, softcap: float | None
) -> dict[str, Any]:
    """The compile-time constants of kernels that call `attend_part`."""
    heads, dim, kv_heads = query.shape[1], query.shape[2], kv_cache.shape[3]
    return dict(
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=padded_dim(dim),
        TILE=max(16, next_power_of_2(heads // kv_heads)), BLOCK_SIZE=kv_cache.shape[2],
        WINDOW=window or 0, SOFTCAP=softcap or 0.0,
    )  # fmt: skip


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
    sinks: torch.Tensor | None = None,  # [heads] float32
    *,
    split: Split | None = None,
    longest: int | None = None,  # upper bound of a sequence's tokens outside its shared prefix; None: unknown
    shared: SharedPrefixes | None = None,
    order: torch.Tensor | None = None,  # [sequences] int32: order in which they start; None: as they stand
) -> None:
    programs = len(query) * kv_cache.shape[3]
    parts = attend_shared(query, kv_cache, tables, rows, workspace, scale, window, softcap, split, longest, shared)
    short = longest is not None and longest <= SHORT
    few = programs <= 16  # then latency is the limit, not bandwidth
    block_n, warps, stages = (32, 4, 4) if few else (64, 2, 3 if short and programs < 1024 else 5)
    shape = part_shape(query, kv_cache, window, softcap) | dict(BLOCK_N=block_n, SHARES=parts.shared is not None)
    _decode_kernel[(kv_cache.shape[3], len(query), parts.split.count)](
        query, kv_cache, tables, rows, lengths, lengths if order is None else order,
        lengths if parts.shared is None else parts.shared, sinks, out, parts.part, parts.lse, scale * LOG2E,
        *parts.numbers, tables.stride(0),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        ORDERED=order is not None, STAGES=stages, num_warps=warps, num_stages=stages, **shape, **early(query),
    )  # fmt: skip
    parts.merge(lengths, out, shape, sinks)
