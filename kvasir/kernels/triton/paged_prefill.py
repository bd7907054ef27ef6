"""Causal paged attention of chunks of query tokens, against a cache that already holds the chunks' own keys and values.

The query heads of a KV group are packed: row r of a chunk is head r % GROUP of its token r // GROUP, so that a tile's
keys are read once for all of them and short chunks fill a tile. Hopper GPUs have a kernel of their own for most models
(hopper_prefill.py); this one is for the others, and for windows, soft caps and 8-bit caches.

Pages of 64 tokens and more are read through a tensor descriptor (on an H200 11 to 31 % faster than pointers); such a
load cannot be masked. What lies in slots past a sequence's end, or in blocks left of its window, may be another
request's: its values are set to 0 where a tile has such slots, since their weight of 0 would not undo a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, gluon_is_known, next_power_of_2, padded_dim
from kvasir.kernels.triton.paged_decode import LOG2E, soft_cap


@triton.jit
def attend_tile(
    q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, sink_ptr, out_ptr, scale,
    table_stride, block_stride, value_stride, token_stride, head_stride, kv_head, seq, tile, piece,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk has TILE_ROWS rows; a piece of it, BLOCK_M of them."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    q_start = tl.load(start_ptr + seq)
    num_q = tl.load(start_ptr + seq + 1) - q_start
    row = tile * TILE_ROWS + piece * BLOCK_M
    rows_end = tl.minimum((tile + 1) * TILE_ROWS, num_q * GROUP)
    if row < rows_end:
        _attend_rows(
            q_ptr, cache_ptr, pages, table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride, sink_ptr, out_ptr,
            scale, block_stride, value_stride, token_stride, head_stride, kv_head, q_start, num_q, row, rows_end,
            tl.load(length_ptr + seq), HEADS, KV_HEADS, DIM, PADDED, BLOCK_SIZE, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP,
            DESCRIPTOR, STAGES,
        )  # fmt: skip


@triton.jit
def _attend_rows(
    q_ptr, cache_ptr, pages, table, sink_ptr, out_ptr, scale, block_stride, value_stride, token_stride, head_stride,
    kv_head, q_start, num_q, row, rows_end, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK_N)
    line = (q_start + m // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    at_q = line[:, None] * DIM + d[None, :]
    used = (m < rows_end)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + at_q, mask=used, other=0.0)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    position = length - num_q + m // GROUP
    first_pos = length - num_q + row // GROUP  # of the first query, and of the last
    last_pos = length - num_q + (row + BLOCK_M - 1) // GROUP
    end = tl.minimum(last_pos + 1, length)
    factor = scale  # multiplies the scores when their exponential is taken
    if SOFTCAP > 0:
        factor = 1.0
    begin = 0
    free_from = 0
    if WINDOW > 0:
        begin = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        # keys from here on lie inside every query's window
        free_from = tl.maximum(last_pos + 1 - WINDOW, 0)
        free_from = tl.cdiv(free_from, BLOCK_N) * BLOCK_N
    free_to = (first_pos + 1) // BLOCK_N * BLOCK_N  # keys before this are seen by every query of the tile
    whole = length
    if DESCRIPTOR:
        whole = length // BLOCK_N * BLOCK_N
    # The window's edge, a loop without masks, the diagonal, and what is read past the sequence's end.
    for phase in tl.static_range(4):
        if phase == 0:
            low = begin
            high = tl.minimum(free_from, free_to)
        elif phase == 1:
            low = tl.maximum(begin, tl.minimum(free_from, free_to))
            high = free_to
        elif phase == 2:
            low = tl.maximum(begin, free_to)
            high = tl.minimum(end, whole)
        else:
            low = tl.maximum(tl.maximum(begin, free_to), whole)
            high = end
        if (phase == 0 and WINDOW > 0) or phase == 1 or phase == 2 or (phase == 3 and DESCRIPTOR):
            for first in tl.range(low, high, BLOCK_N, num_stages=STAGES):
                if DESCRIPTOR:
                    page = tl.load(table + first // BLOCK_SIZE) * 2 * BLOCK_SIZE + first % BLOCK_SIZE
                    k = pages.load([page, kv_head * DIM])
                    v = pages.load([page + BLOCK_SIZE, kv_head * DIM])
                else:
                    token = first + n
                    if phase == 2:
                        token = tl.minimum(token, length - 1)  # the table may end inside this tile
                    block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
                    at = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
                    k = tl.load(cache_ptr + at[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
                    v = tl.load(cache_ptr + value_stride + at[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
                k = k.to(q.dtype)  # the cache may hold 8-bit floats
                v = v.to(q.dtype)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                if SOFTCAP > 0:
                    s = soft_cap(s * scale, SOFTCAP)
                if phase != 1:
                    key = (first + n)[None, :]
                    seen = key <= position[:, None]
                    if WINDOW > 0:
                        seen = seen & (key > position[:, None] - WINDOW)
                    s = tl.where(seen, s, -float("inf"))
                if phase == 3 or (WINDOW > 0 and phase != 1):  # through registers, slower: not on every diagonal
                    own = first + n < length
                    if WINDOW > 0:
                        own = own & (first + n > first_pos - WINDOW)  # seen by some query of the tile
                    v = tl.where(own[:, None], v, 0.0)
                new_top = tl.maximum(top, tl.max(s, 1) * factor)
                if WINDOW > 0:  # a row may see nothing of a tile
                    new_top = tl.maximum(new_top, -1.0e30)
                p = tl.exp2(s * factor - new_top[:, None])
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(p, 1)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
                top = new_top
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + kv_head * GROUP + m % GROUP) * 1.4426950408889634 - top)
    tl.store(out_ptr + at_q, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "start_ptr", "length_ptr"])
def _prefill_kernel(
    q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, sink_ptr, out_ptr, scale,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest tiles first: a shorter tail
    attend_tile(
        q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, sink_ptr, out_ptr, scale, table_stride,
        block_stride, value_stride, token_stride, head_stride, tl.program_id(0), tl.program_id(2), tile, 0, HEADS,
        KV_HEADS, DIM, PADDED, BLOCK_SIZE, BLOCK_M, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, DESCRIPTOR, STAGES,
    )  # fmt: skip


def is_hopper(x: torch.Tensor) -> bool:
    """Whether x is on a GPU of compute capability 9.0, whose tensor cores Gluon's wgmma is for."""
    on_one = x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) == (9, 0)
    return on_one and gluon_is_known()


@dataclass(slots=True)
class Reading:
    """How `attend_tile` reads the cache: whole tiles through a descriptor, or tokens one by one."""

    pages: Any  # the descriptor, or the cache once more
    constants: dict[str, Any]

    @classmethod
    def of(cls, query: torch.Tensor, kv_cache: torch.Tensor, most_rows: int) -> Reading:
        """`most_rows` is an upper bound of the rows of a chunk, or of a tile of one."""
        blocks, _, block_size, kv_heads, dim = kv_cache.shape
        descriptor, pages = reads_by_descriptor(query, kv_cache), kv_cache
        block_m, block_n, stages = (128, 64, 3) if descriptor else (64, 32, 3)
        if descriptor:
            from triton.tools.tensor_descriptor import TensorDescriptor

            width = kv_heads * dim
            pages = TensorDescriptor(kv_cache, [blocks * 2 * block_size, width], [width, 1], [block_n, dim])
        block_m = min(block_m, max(16, next_power_of_2(most_rows)))
        how = dict(BLOCK_M=block_m, BLOCK_N=block_n, DESCRIPTOR=descriptor, STAGES=stages, num_stages=stages)
        return cls(pages, how)


def reads_by_descriptor(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    block_size, dim = kv_cache.shape[2], kv_cache.shape[4]
    whole = block_size % 64 == 0 and padded_dim(dim) == dim and query.element_size() == 2 and query.is_cuda
    return whole and kv_cache.is_contiguous() and dim * kv_cache.itemsize >= 32  # bytes of a tile's row


def paged_prefill(
    query: torch.Tensor,  # [tokens, heads, head_dim], contiguous
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim], contiguous
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [chunks]: the row of `tables` that belongs to each
    starts: torch.Tensor,  # [chunks + 1] int32: chunk i has the queries starts[i]:starts[i + 1]
    lengths: torch.Tensor,  # [chunks] int32: tokens of each sequence, its chunk included
    longest: int,  # upper bound of a chunk's queries
    out: torch.Tensor,  # like query
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] float32
) -> None:
    if window is None and softcap is None and is_hopper(query):
        from kvasir.kernels.triton import hopper_prefill

        if hopper_prefill.takes(query, kv_cache):
            hopper_prefill.hopper_prefill(
                query, kv_cache, tables, rows, starts, lengths, longest, out, scale * LOG2E, sinks
            )
            return
    _, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    most_rows = longest * (heads // kv_heads)
    reading = Reading.of(query, kv_cache, most_rows)
    _prefill_kernel[(kv_heads, cdiv(most_rows, reading.constants["BLOCK_M"]), len(rows))](
        query, kv_cache, reading.pages, tables, rows, starts, lengths, sinks, out, scale * LOG2E,
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=padded_dim(dim), BLOCK_SIZE=block_size,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, num_warps=4, **reading.constants, **early(query),
    )  # fmt: skip
