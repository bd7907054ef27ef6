"""Paged attention of a step of decodes and chunks in one launch, whose grid depends on neither.

The first programs take tiles of chunks, the others parts of sequences that run one token: while the last tiles compute,
there is already something to read. Tiles and parts are listed in device memory, so that a CUDA graph can hold
the launch, and a program takes several of them: one that finds nothing to do costs as much as one that is placed, which
is ten times as much as in paged_decode, since tiles take most of a processor's memory.
On an H200 it takes 63 to 101 % of the time of a launch for each kind.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import SharedPrefixes, Tiles
from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2
from kvasir.kernels.triton.paged_decode import (
    LOG2E,
    Parts,
    Split,
    Workspace,
    attend_part,
    attend_shared,
    find_part,
    first_keys,
    merge_parts,
    part_length,
    part_shape,
)
from kvasir.kernels.triton.paged_prefill import Reading, attend_tile, is_hopper

PROGRAMS = 256  # enough to fill a GPU; if there are more tiles or parts, each program takes several
PART_STAGES = 5  # of a loop whose loads wait for the block table, which amounts to two tiles ahead
MIN_HOPPER_TOKENS = 128  # of a step
LISTED_ROWS, MERGED_SLOTS = 1024, 32  # at least: one variant of a kernel serves nearly all steps
COUNTS = 2  # numbers at the beginning of a list: its parts, and sequences that have several


@triton.jit(
    do_not_specialize=["count", "log_splits", "least"],
    do_not_specialize_on_alignment=["length_ptr", "shared_ptr", "list_ptr"],
)
def _list_parts_kernel(
    length_ptr, shared_ptr, list_ptr, count, log_splits, least,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, SHARES: tl.constexpr, BLOCK_N: tl.constexpr, COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List the sequences whose parts must be merged, then all parts: sequence << log_splits | part. Cut as by
    find_part."""
    await_previous(PDL)
    i = tl.arange(0, ROWS)
    length = tl.load(length_ptr + i, mask=i < count, other=0)
    shared = tl.zeros([ROWS], tl.int32)
    if SHARES:
        shared = tl.load(shared_ptr + i, mask=i < count, other=0)
    origin = shared
    if WINDOW > 0:
        origin = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N
    span = tl.maximum(length - origin, 0)
    own = tl.cdiv(span, part_length(span, log_splits, least, BLOCK_N))
    ends = tl.cumsum(own, 0)
    several = ((length > 0) & ((own > 1) | (shared > 0))).to(tl.int32)
    before = tl.cumsum(several, 0)
    tl.store(list_ptr, tl.sum(own, 0))
    tl.store(list_ptr + 1, tl.sum(several, 0))
    tl.store(list_ptr + COUNTS + before - 1, i, mask=several > 0)
    for part in range(0, tl.max(own, 0)):
        tl.store(list_ptr + COUNTS + count + ends - own + part, (i << log_splits) + part, mask=part < own)


@triton.jit
def _attend_listed(
    q_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr,
    scale, log_splits, least, extra, sequences, table_stride, block_stride, value_stride, token_stride, head_stride,
    kv_head, first, programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SHARES: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Every part of the list from `first` on whose turn it is, for the heads of one KV group."""
    for at in range(first, tl.load(list_ptr), programs):
        entry = tl.load(list_ptr + COUNTS + sequences + at)
        seq = entry >> log_splits
        part = entry & ((1 << log_splits) - 1)
        length = tl.load(length_ptr + seq)
        table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
        start, end, is_whole = find_part(
            length, part, shared_ptr + seq, log_splits, least, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N
        )
        attend_part(
            q_ptr, cache_ptr, table, sink_ptr, out_ptr, part_ptr, lse_ptr, scale, log_splits, extra,
            block_stride, value_stride, token_stride, head_stride, kv_head, seq, part, length, start, end, is_whole,
            HEADS, KV_HEADS, DIM, PADDED, TILE, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, STAGES,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra", "tile_programs", "part_programs", "sequences"],
    do_not_specialize_on_alignment=[
        "row_ptr", "start_ptr", "length_ptr", "tile_count_ptr", "tile_seq_ptr", "tile_ptr", "decode_length_ptr",
        "shared_ptr", "list_ptr",
    ],
)  # fmt: skip
def _mixed_kernel(
    q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, tile_count_ptr, tile_seq_ptr, tile_ptr,
    decode_length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr, scale, log_splits, least, extra,
    tile_programs, part_programs, sequences,
    table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SHARES: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
    STAGES: tl.constexpr, PART_STAGES: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (TILE_ROWS + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    await_previous(PDL)
    if place < tile_programs:
        pieces = tl.load(tile_count_ptr) * PIECES
        for done in range(place, pieces, tile_programs):
            at = pieces - 1 - done  # the last tiles of a chunk see most keys, so they come first
            attend_tile(
                q_ptr, cache_ptr, pages, table_ptr, row_ptr, start_ptr, length_ptr, sink_ptr, out_ptr, scale,
                table_stride, block_stride, value_stride, token_stride, head_stride, kv_head,
                tl.load(tile_seq_ptr + at // PIECES), tl.load(tile_ptr + at // PIECES), at % PIECES,
                HEADS, KV_HEADS, DIM, PADDED, BLOCK_SIZE, TILE_ROWS,
                BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, DESCRIPTOR, STAGES,
            )  # fmt: skip
    else:
        _attend_listed(
            q_ptr, cache_ptr, table_ptr, row_ptr, decode_length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, part_ptr,
            lse_ptr, scale, log_splits, least, extra, sequences, table_stride, block_stride, value_stride, token_stride,
            head_stride, kv_head, place - tile_programs, part_programs,
            HEADS, KV_HEADS, DIM, PADDED, TILE, BLOCK_SIZE, BLOCK_N, WINDOW, SHARES, SOFTCAP, PART_STAGES, COUNTS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra", "sequences"],
    do_not_specialize_on_alignment=["row_ptr", "length_ptr", "shared_ptr", "list_ptr"],
)
def _parts_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr,
    scale, log_splits, least, extra, sequences, table_stride, block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SHARES: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The listed parts alone, where another kernel takes the tiles."""
    await_previous(PDL)
    _attend_listed(
        q_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, part_ptr, lse_ptr,
        scale, log_splits, least, extra, sequences, table_stride, block_stride, value_stride, token_stride, head_stride,
        tl.program_id(0), tl.program_id(1), tl.num_programs(1),
        HEADS, KV_HEADS, DIM, PADDED, TILE, BLOCK_SIZE, BLOCK_N, WINDOW, SHARES, SOFTCAP, STAGES, COUNTS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra"],
    do_not_specialize_on_alignment=["length_ptr", "shared_ptr", "list_ptr"],
)
def _merge_listed_kernel(
    part_ptr, lse_ptr, length_ptr, shared_ptr, list_ptr, sink_ptr, out_ptr, log_splits, least, extra,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SHARES: tl.constexpr, SLOTS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    await_previous(PDL)
    for at in range(tl.program_id(1), tl.load(list_ptr + 1), tl.num_programs(1)):
        seq = tl.load(list_ptr + COUNTS + at)
        length = tl.load(length_ptr + seq)
        shared, origin = first_keys(length, shared_ptr + seq, WINDOW, SHARES, BLOCK_SIZE, BLOCK_N)
        own = tl.cdiv(length - origin, part_length(length - origin, log_splits, least, BLOCK_N))
        merge_parts(
            part_ptr, lse_ptr, sink_ptr, out_ptr, log_splits, extra, seq, head, shared, own, HEADS, DIM, PADDED, SLOTS
        )


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
    sinks: torch.Tensor | None = None,  # [heads] float32
    *,
    split: Split | None = None,
    longest: int | None = None,  # see paged_decode
    shared: SharedPrefixes | None = None,  # of the decodes
) -> None:
    count, heads, kv_heads = rows.shape[0], query.shape[1], kv_cache.shape[3]
    parts = attend_shared(
        query[:count], kv_cache, tables, rows, workspace, scale, window, softcap, split, longest, shared
    )
    shape = part_shape(query, kv_cache, window, softcap) | dict(SHARES=parts.shared is not None)
    strides = (tables.stride(0), *kv_cache.stride()[:4])
    shared_tokens = lengths if parts.shared is None else parts.shared
    programs = max(1, PROGRAMS // kv_heads)
    if _takes_tiles(query, kv_cache, window, softcap, tiles):
        shape |= dict(BLOCK_N=64)
        listed = _list_parts(tiles, parts, shape["WINDOW"], shape["BLOCK_N"])
        _parts_kernel[(kv_heads, min(count * parts.split.count, 4 * programs))](
            query, kv_cache, tables, rows, tiles.decode_lens, shared_tokens, listed, sinks, out, parts.part, parts.lse,
            scale * LOG2E, *parts.numbers, count, *strides,
            STAGES=PART_STAGES, COUNTS=COUNTS, num_warps=2, num_stages=PART_STAGES, **shape, **early(query),
        )  # fmt: skip
        hopper = _hopper()
        cut = tiles.cut(hopper.tile_tokens(query, kv_cache))
        hopper.hopper_prefill(query, kv_cache, tables, rows, starts, lengths, None, out, scale * LOG2E, sinks, cut)
    else:
        height = 16 if tiles.size <= 64 else 64
        cut, tile_rows = tiles.cut(height), height * (heads // kv_heads)
        reading = Reading.of(query, kv_cache, tile_rows)
        shape |= reading.constants
        shape["BLOCK_M"] = min(64, shape["BLOCK_M"])
        listed = _list_parts(tiles, parts, shape["WINDOW"], shape["BLOCK_N"])
        tile_programs = min(cut.sequence.shape[0] * cdiv(tile_rows, shape["BLOCK_M"]), programs)
        part_programs = min(count * parts.split.count, programs)
        _mixed_kernel[(kv_heads, tile_programs + part_programs)](
            query, kv_cache, reading.pages, tables, rows, starts, lengths, cut.count, cut.sequence, cut.number,
            tiles.decode_lens, shared_tokens, listed, sinks, out, parts.part, parts.lse,
            scale * LOG2E, *parts.numbers, tile_programs, part_programs, count, *strides,
            TILE_ROWS=tile_rows, PART_STAGES=PART_STAGES, COUNTS=COUNTS, num_warps=4, **shape, **early(query),
        )  # fmt: skip
    slots = parts.extra + parts.split.count
    if slots == 1:
        return
    shape = {name: shape[name] for name in ("HEADS", "DIM", "PADDED", "BLOCK_SIZE", "BLOCK_N", "WINDOW", "SHARES")}
    _merge_listed_kernel[(heads, min(count, max(1, PROGRAMS // 8)))](
        parts.part, parts.lse, tiles.decode_lens, shared_tokens, listed, sinks, out[:count], *parts.numbers,
        SLOTS=max(MERGED_SLOTS, next_power_of_2(slots)), COUNTS=COUNTS, num_warps=1, **shape, **early(out),
    )  # fmt: skip


def _takes_tiles(
    query: torch.Tensor, kv_cache: torch.Tensor, window: int | None, softcap: float | None, tiles: Tiles
) -> bool:
    """Whether the kernel for prompts on Hopper GPUs takes the tiles: it computes them three times as fast, and small
    steps are not worth another launch."""
    if window is not None or softcap is not None or tiles.size < MIN_HOPPER_TOKENS or not is_hopper(query):
        return False
    return bool(_hopper().takes(query, kv_cache))


def _hopper() -> Any:
    from kvasir.kernels.triton import hopper_prefill  # imports Gluon, which changes from version to version

    return hopper_prefill


def _list_parts(tiles: Tiles, parts: Parts, window: int, block_n: int) -> torch.Tensor:
    """The parts of all sequences that run one token, listed in the first of the layers that cut them alike."""
    log_splits, least, _ = parts.numbers
    key = (window, block_n, log_splits, least, parts.shared is not None)
    if key not in tiles.parts:
        lengths = tiles.decode_lens
        count = lengths.shape[0]
        listed = torch.empty(COUNTS + count + (count << log_splits), dtype=torch.int32, device=lengths.device)
        _list_parts_kernel[(1,)](
            lengths, lengths if parts.shared is None else parts.shared, listed, count, log_splits, least,
            ROWS=max(LISTED_ROWS, next_power_of_2(count)), WINDOW=window, SHARES=parts.shared is not None,
            BLOCK_N=block_n, COUNTS=COUNTS, num_warps=4, **early(lengths),
        )  # fmt: skip
        tiles.parts[key] = listed
    return tiles.parts[key]
