"""Paged attention of a step of decodes and chunks in one launch, whose grid depends on neither.

The first programs take tiles of chunks, the others parts of sequences that run one token: while the last tiles compute,
there is already something to read. Tiles and parts are listed in device memory, so that a CUDA graph can hold
the launch. On an H200 it takes 63 to 101 % of the time of a launch for each kind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import SharedPrefixes, Tiles
from kvasir.kernels.triton.launch import await_previous, early
from kvasir.kernels.triton.paged_decode import (
    LOG2E,
    Split,
    Workspace,
    attend_part,
    attend_shared,
    find_part,
    part_shape,
)
from kvasir.kernels.triton.paged_prefill import Reading, attend_tile

PROGRAMS = 256  # enough to fill a GPU; if there are more tiles, each program takes several
PART_STAGES = 5  # of a loop whose loads wait for the block table, which amounts to two tiles ahead


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra", "tile_programs"],
    do_not_specialize_on_alignment=[
        "row_ptr", "start_ptr", "length_ptr", "tile_count_ptr", "tile_seq_ptr", "tile_ptr", "decode_length_ptr",
        "shared_ptr",
    ],
)  # fmt: skip
def _mixed_kernel(
    q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, tile_count_ptr, tile_seq_ptr, tile_ptr,
    decode_length_ptr, shared_ptr, out_ptr, part_ptr, lse_ptr, scale, log_splits, least, extra, tile_programs,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SHARES: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
    STAGES: tl.constexpr, PART_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    pieces = tl.load(tile_count_ptr, cache_modifier=".cg") * PIECES
    seq = tl.maximum(place - tile_programs, 0) >> log_splits
    part = (place - tile_programs) & ((1 << log_splits) - 1)
    length = tl.load(decode_length_ptr + seq, cache_modifier=".cg")
    table = table_ptr + tl.load(row_ptr + seq, cache_modifier=".cg").to(tl.int64) * table_stride
    start, end, is_whole = find_part(
        length, part, shared_ptr + seq, log_splits, least, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N
    )
    await_previous(PDL)
    if place < tile_programs:
        for done in range(place, pieces, tile_programs):
            at = pieces - 1 - done  # the last tiles of a chunk see most keys, so they come first
            attend_tile(
                q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, out_ptr, scale, table_stride,
                block_stride, value_stride, token_stride, head_stride, kv_head, tl.load(tile_seq_ptr + at // PIECES),
                tl.load(tile_ptr + at // PIECES), at % PIECES, HEADS, KV_HEADS, DIM, PADDED, BLOCK_SIZE, TILE_ROWS,
                BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, DESCRIPTOR, STAGES,
            )  # fmt: skip
    elif start < length:
        attend_part(
            q_ptr, cache_ptr, table, out_ptr, part_ptr, lse_ptr, scale, log_splits, extra,
            block_stride, value_stride, token_stride, head_stride, kv_head, seq, part, length, start, end, is_whole,
            HEADS, KV_HEADS, DIM, PADDED, TILE, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, PART_STAGES,
        )  # fmt: skip


def paged_mixed(
    query: torch.Tensor,  # [tokens, heads, head_dim], contiguous; sequences of one token stand first
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim], contiguous
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [sequences]: the row of `tables` that belongs to each
    starts: torch.Tensor,  # [sequences + 1] int32: sequence i has the queries starts[i]:starts[i + 1]
    lengths: torch.Tensor,  # [sequences] int32: tokens of each, its queries included
    tiles: Tiles,
    out: torch.Tensor,  # like query
    workspace: Workspace,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    split: Split | None = None,
    longest: int | None = None,  # see paged_decode
    shared: SharedPrefixes | None = None,  # of the decodes
) -> None:
    singles, singles_out = query[: len(rows)], out[: len(rows)]
    parts = attend_shared(singles, kv_cache, tables, rows, workspace, scale, window, softcap, split, longest, shared)
    heads, kv_heads = query.shape[1], kv_cache.shape[3]
    tile_rows = tiles.height * (heads // kv_heads)
    reading = Reading.of(query, kv_cache, tile_rows)
    shape = part_shape(query, kv_cache, window, softcap) | reading.constants
    shape |= dict(BLOCK_M=min(64, shape["BLOCK_M"]), SHARES=parts.shared is not None)
    pieces = len(tiles.sequence) * triton.cdiv(tile_rows, shape["BLOCK_M"])
    tile_programs = min(pieces, max(1, PROGRAMS // kv_heads))
    _mixed_kernel[(kv_heads, tile_programs + len(rows) * parts.split.count)](
        query, kv_cache, reading.pages, tables, rows, starts, lengths, tiles.count, tiles.sequence, tiles.number,
        tiles.decode_lens, lengths if parts.shared is None else parts.shared, out, parts.part, parts.lse,
        scale * LOG2E, *parts.numbers, tile_programs,
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        TILE_ROWS=tile_rows, PART_STAGES=PART_STAGES, num_warps=4, **shape, **early(query),
    )  # fmt: skip
    parts.merge(tiles.decode_lens, singles_out, shape)
