"""The first stage of attention for sequences that begin with the same blocks: those are read once for all of them.

Every query head of every sequence is a row of one dense product with the shared keys. The second stage (paged_decode)
adds each sequence's own tokens. On an H200, 256 sequences of 2048 shared and 192 own tokens: 95 µs a layer, not 314.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early

MOST_PARTS = 4  # into so many the prefix is cut at most
PROGRAMS = 256  # that fill a GPU


@triton.jit(do_not_specialize=["num_lines", "slots"], do_not_specialize_on_alignment=["row_ptr", "prefix_ptr"])
def _prefix_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, prefix_ptr, part_ptr, lse_ptr, scale, num_lines, slots,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A line is (sequence, head of the group) of one KV head."""
    await_previous(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK_N)
    head = (m // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    used = (m < num_lines)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + d[None, :], mask=used, other=0.0)
    prefix = tl.load(prefix_ptr)
    table = table_ptr + tl.load(row_ptr).to(tl.int64) * table_stride  # everybody's first blocks are the first one's
    size = tl.cdiv(tl.cdiv(prefix, PARTS), BLOCK_N) * BLOCK_N
    start = part * size
    end = tl.minimum(start + size, prefix)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):  # whole tiles: a prefix is made of whole blocks
        token = first + n
        block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        at = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
        k = tl.load(cache_ptr + at[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        v = tl.load(cache_ptr + value_stride + at[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        k = k.to(q.dtype)  # the cache may hold 8-bit floats
        v = v.to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    slot = head * slots + part
    empty = total == 0  # a part past the prefix's end
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(part_ptr + slot[:, None] * DIM + d[None, :], acc, mask=used)
    tl.store(lse_ptr + slot, tl.where(empty, -float("inf"), top + tl.log2(total)), mask=m < num_lines)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the queries' lines are cut into tiles, and the prefix into parts for more programs."""

    height: int
    warps: int
    parts: int  # each is one more partial result to write and merge


def choose_tiling(lines: int, kv_heads: int) -> Tiling:
    height, warps = (128, 8) if lines >= 512 else (64, 4) if lines >= 64 else (16, 4)
    programs = triton.cdiv(lines, height) * kv_heads
    return Tiling(height, warps, max(1, min(MOST_PARTS, PROGRAMS // programs)))


def attend_prefix(
    query: torch.Tensor,  # [sequences, heads, head_dim], contiguous
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim]
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [sequences]
    prefix: torch.Tensor,  # [1] int32: so many tokens, a multiple of the block size, are the same blocks for all
    part: torch.Tensor,  # partial results, [sequences, heads, slots, head_dim] ...
    lse: torch.Tensor,  # ... and their log-sum-exp; the first slots of each head are written, one for each part
    slots: int,
    scale: float,
    tiling: Tiling,
) -> None:
    sequences, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    lines = sequences * (heads // kv_heads)
    block_n = min(64, block_size)
    _prefix_kernel[(triton.cdiv(lines, tiling.height), kv_heads, tiling.parts)](
        query, kv_cache, tables, rows, prefix, part, lse, scale * 1.4426950408889634, lines, slots,
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=triton.next_power_of_2(dim), BLOCK_SIZE=block_size,
        BLOCK_M=tiling.height, BLOCK_N=block_n, PARTS=tiling.parts, STAGES=3, num_warps=tiling.warps, num_stages=3,
        **early(query),
    )  # fmt: skip


def pays(sequences: int, prefix: int) -> bool:
    """Measured on an H200: more sequences make a shorter prefix worth the second stage."""
    return prefix >= (512 if sequences >= 128 else 1024 if sequences >= 32 else 2048) and sequences >= 16
