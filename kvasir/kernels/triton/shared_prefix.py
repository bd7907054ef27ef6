"""The first stage of attention for groups of sequences that begin with the same blocks: those are read once for all
of a group.

Every query head of every sequence of a group is a row of one dense product with its shared keys. The second stage
(attend_part) adds each sequence's own tokens, and all tokens of those that are in no group. On an H200, 256 sequences
of 2048 shared and 192 own tokens: 95 µs a layer, not 314.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import SharedPrefixes
from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2, padded_dim

ENTRY = 8  # numbers of a tile in the list, of which five are used
MAX_PARTS = 4  # of a prefix
PROGRAMS = 256  # enough to fill a GPU


@triton.jit(
    do_not_specialize=["groups"], do_not_specialize_on_alignment=["row_ptr", "shared_ptr", "member_ptr", "start_ptr"]
)
def _list_kernel(
    row_ptr, shared_ptr, member_ptr, start_ptr, tile_ptr, groups,
    LINES: tl.constexpr, HEIGHT: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, ENTRY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Cut each group's lines, LINES for each sequence, into tiles; lines of no group have none."""
    await_previous(PDL)
    i = tl.arange(0, GROUPS)
    t = tl.arange(0, TILES)
    starts = tl.load(start_ptr + i, mask=i < groups, other=0)
    lines = (tl.load(start_ptr + i + 1, mask=i < groups, other=0) - starts) * LINES
    tiles = tl.cdiv(lines, HEIGHT)
    ends = tl.cumsum(tiles, 0)
    own = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    here = i[None, :] == own[:, None]
    begin = tl.sum(tl.where(here, starts[None, :], 0), 1)
    count = tl.sum(tl.where(here, lines[None, :], 0), 1)
    first = tl.sum(tl.where(here, (ends - tiles)[None, :], 0), 1)
    one = tl.load(member_ptr + begin, mask=count > 0, other=0)  # all of them have the same first blocks
    entry = tile_ptr + t * ENTRY
    tl.store(entry, t - first)
    tl.store(entry + 1, count)
    tl.store(entry + 2, begin)
    tl.store(entry + 3, tl.load(shared_ptr + one))
    tl.store(entry + 4, tl.load(row_ptr + one).to(tl.int32))


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["member_ptr"])
def _prefix_kernel(
    q_ptr, cache_ptr, table_ptr, member_ptr, tile_ptr, part_ptr, lse_ptr, scale, slots,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENTRY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A line is (sequence, query head) of one KV head; a tile has lines of one group of sequences."""
    await_previous(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    entry = tile_ptr + tl.program_id(2) * ENTRY  # the slowest index: unused tiles come last
    tile = tl.load(entry)
    num_lines = tl.load(entry + 1)
    member_ptr += tl.load(entry + 2)
    prefix = tl.load(entry + 3)
    table = table_ptr + tl.load(entry + 4).to(tl.int64) * table_stride
    if num_lines == 0:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED)
    n = tl.arange(0, BLOCK_N)
    seq = tl.load(member_ptr + m // GROUP, mask=m < num_lines, other=0)
    head = seq.to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    used = (m < num_lines)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + d[None, :], mask=used, other=0.0)
    size = tl.cdiv(tl.cdiv(prefix, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    start = part * size
    stop = tl.minimum(start + size, prefix)
    acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):  # whole tiles: a prefix is made of whole blocks
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
    """How lines of queries are cut into tiles, and the prefix into parts so that more programs can run."""

    height: int
    warps: int
    parts: int  # each adds a partial result to write and merge


def choose_tiling(lines: int, kv_heads: int) -> Tiling:
    height, warps = (128, 8) if lines >= 512 else (64, 4) if lines >= 64 else (16, 4)
    programs = cdiv(lines, height) * kv_heads
    return Tiling(height, warps, max(1, min(MAX_PARTS, PROGRAMS // programs)))


def list_tiles(rows: torch.Tensor, shared: SharedPrefixes, lines: int, height: int) -> torch.Tensor:
    """[tiles, ENTRY] int32, listed in the first layer: the tile's number in its group, lines of that group, where its
    members begin, the number of shared tokens, and the row whose block table holds them."""
    if (lines, height) not in shared.tiles:
        groups = len(shared.starts) - 1
        tiles = cdiv(len(rows) * lines, height) + groups - 1  # the last tile of each group may be short
        listed = torch.empty(max(128, next_power_of_2(tiles)), ENTRY, dtype=torch.int32, device=rows.device)
        _list_kernel[(1,)](
            rows, shared.tokens, shared.members, shared.starts, listed, groups,
            LINES=lines, HEIGHT=height, TILES=len(listed), GROUPS=next_power_of_2(groups), ENTRY=ENTRY,
            num_warps=4, **early(rows),
        )  # fmt: skip
        shared.tiles[lines, height] = listed[:tiles]
    return shared.tiles[lines, height]


def attend_prefixes(
    query: torch.Tensor,  # [sequences, heads, head_dim], contiguous
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim]
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [sequences]
    shared: SharedPrefixes,
    part: torch.Tensor,  # partial results, [sequences, heads, slots, head_dim] ...
    lse: torch.Tensor,  # ... and their log-sum-exp; the first slots of each head are written, one for each part
    slots: int,
    scale: float,
    tiling: Tiling,
) -> None:
    _, heads, dim = query.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    block_n = min(64, block_size)
    tiles = list_tiles(rows, shared, heads // kv_heads, tiling.height)
    _prefix_kernel[(kv_heads, tiling.parts, len(tiles))](
        query, kv_cache, tables, shared.members, tiles, part, lse, scale * 1.4426950408889634, slots,
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=padded_dim(dim), BLOCK_SIZE=block_size,
        BLOCK_M=tiling.height, BLOCK_N=block_n, ENTRY=ENTRY, STAGES=3, num_warps=tiling.warps, num_stages=3,
        **early(query),
    )  # fmt: skip
