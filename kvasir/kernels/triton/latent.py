"""Attention over a latent cache: one vector for each token that is key and value of all heads, and one rotated key.

Single tokens, and the chunks of steps that run as graphs, have queries to which each head's matrices were applied, so
that the cached vectors are read as they are, once for a block of heads. Chunks of larger steps meet keys and values
that were computed from the vectors, a piece of the texts at a time; what a piece gives is merged with what earlier ones
gave by the sums of their weights. Lengths and block tables are read from device memory, as in paged_decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import Tiles
from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2
from kvasir.kernels.triton.paged_decode import (
    LOG2E,
    NO_SPLIT,
    Parts,
    Split,
    Workspace,
    choose_split,
    find_part,
)
from kvasir.kernels.triton.paged_prefill import is_hopper

TILE_PROGRAMS = 264  # two for each multiprocessor of an H200

# ---------------------------------------------------------------- norm, rotation and store


@triton.jit
def _partners(d, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Each number's partner in the rotation, their angle, and whether it is the left one of the two."""
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = d ^ 1
        angle = d // 2
        left = d % 2 == 0
    else:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        angle = tl.where(d < HALF, d, d - HALF)
        left = d < HALF
    return tl.where(d < ROTARY, partner, 0), tl.where(d < ROTARY, angle, 0), left


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _latent_store_kernel(
    q_ptr, x_ptr, cache_ptr, gain_ptr, position_ptr, slot_ptr, table_ptr, eps, unit,
    q_token_stride, q_head_stride, x_stride, block_stride, token_stride,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's vector and key, or the rotated parts of GROUP of its queries, which are rotated in place."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED_ROTARY)
    inside = d < ROTARY
    partner, angle, left = _partners(d, ROTARY, INTERLEAVED)
    position = tl.load(position_ptr + token, cache_modifier=".cg")
    slot = tl.load(slot_ptr + token, cache_modifier=".cg")
    dtype = q_ptr.dtype.element_ty
    table = table_ptr + position * ROTARY + angle
    cos = tl.load(table).to(dtype).to(tl.float32)
    sin = tl.load(table + ROTARY // 2).to(dtype).to(tl.float32) * tl.where(left, -1.0, 1.0)
    await_previous(PDL)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP)
        row = q_ptr + token * q_token_stride + head[:, None] * q_head_stride + PLAIN
        mask = (head < HEADS)[:, None] & inside[None, :]
        a = tl.load(row + d[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        turned = (a * cos[None, :] + b * sin[None, :]).to(dtype)
        tl.debug_barrier()  # all partners are read before any is overwritten
        tl.store(row + d[None, :], turned, mask=mask)
    elif slot >= 0:
        n = tl.arange(0, PADDED)
        x = tl.load(x_ptr + token * x_stride + n, mask=n < LATENT, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + n, mask=n < LATENT, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps)
        x = (x.to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype)
        key = x_ptr + token * x_stride + LATENT
        a = tl.load(key + d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(key + partner, mask=inside, other=0.0).to(tl.float32)
        y = (a * cos + b * sin).to(dtype)
        at = cache_ptr + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
        if LIMIT > 0:  # 8-bit floats: values that are too large become the largest one
            stored = tl.minimum(tl.maximum(x.to(tl.float32) / unit, -LIMIT), LIMIT)
            turned_key = tl.minimum(tl.maximum(y.to(tl.float32) / unit, -LIMIT), LIMIT)
        else:
            stored = x
            turned_key = y
        tl.store(at + n, stored.to(cache_ptr.dtype.element_ty), mask=n < LATENT)
        tl.store(at + LATENT + d, turned_key.to(cache_ptr.dtype.element_ty), mask=inside)


def latent_store(
    query: torch.Tensor,
    cached: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    interleaved: bool = False,
    unit: float = 1.0,
) -> torch.Tensor:
    """See reference.latent_store. The queries are rotated in place; a negative slot is stored nowhere."""
    (tokens, heads, width), (latent,), rotary = query.shape, gain.shape, table.shape[1]
    assert query.stride(2) == cached.stride(1) == kv_cache.stride(2) == 1, "numbers of a vector lie side by side"
    group = min(16, next_power_of_2(heads))
    eight_bit = kv_cache.is_floating_point() and kv_cache.itemsize == 1
    _latent_store_kernel[(tokens, 1 + cdiv(heads, group))](
        query, cached, kv_cache, gain, positions, slots, table, eps, unit,
        query.stride(0), query.stride(1), cached.stride(0), kv_cache.stride(0), kv_cache.stride(1),
        HEADS=heads, PLAIN=width - rotary, LATENT=latent, PADDED=next_power_of_2(latent), ROTARY=rotary,
        PADDED_ROTARY=next_power_of_2(rotary), BLOCK_SIZE=kv_cache.shape[1], GROUP=group, INTERLEAVED=interleaved,
        LIMIT=torch.finfo(kv_cache.dtype).max if eight_bit else 0.0, num_warps=4, **early(query),
    )  # fmt: skip
    return query


# ---------------------------------------------------------------- queries that meet the vectors


@triton.jit
def _attend_vectors(
    latent_q, rotated_q, cache_ptr, table, scale, first_key, end, limit, block_stride, token_stride,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of queries over the keys from `first_key` to `end`; with CAUSAL, a row sees those below its `limit`. The
    weighted sums, divided by the sums of weights, and the logarithm (to base 2) of those."""
    d = tl.arange(0, PADDED)
    r = tl.arange(0, PADDED_ROTARY)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(first_key, end, BLOCK_N, num_stages=STAGES):
        token = first + n
        valid = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = cache_ptr + block * block_stride + (token % BLOCK_SIZE) * token_stride
        k = tl.load(at[:, None] + d[None, :], mask=valid[:, None] & (d < LATENT)[None, :], other=0.0)
        turned = tl.load(at[:, None] + LATENT + r[None, :], mask=valid[:, None] & (r < ROTARY)[None, :], other=0.0)
        k = k.to(latent_q.dtype)  # the cache may hold 8-bit floats
        s = tl.dot(latent_q, tl.trans(k), input_precision="ieee")
        s = tl.dot(rotated_q, tl.trans(turned.to(latent_q.dtype)), s, input_precision="ieee") * scale
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] < limit[:, None])
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc / total[:, None], top + tl.log2(total)


@triton.jit(
    do_not_specialize=["log_splits", "least", "extra"], do_not_specialize_on_alignment=["row_ptr", "length_ptr"]
)
def _latent_decode_kernel(
    q_ptr, rotated_ptr, cache_ptr, table_ptr, row_ptr, length_ptr, out_ptr, part_ptr, lse_ptr, scale, unit, log_splits,
    least, extra, q_token_stride, q_head_stride, r_token_stride, r_head_stride, table_stride, block_stride,
    token_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(length_ptr + seq, cache_modifier=".cg")
    table = table_ptr + tl.load(row_ptr + seq, cache_modifier=".cg").to(tl.int64) * table_stride
    start, end, is_whole = find_part(length, part, length_ptr, log_splits, least, 0, False, BLOCK_SIZE, BLOCK_N)
    await_previous(PDL)
    if start >= length:
        return
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    r = tl.arange(0, PADDED_ROTARY)
    there = (head < HEADS)[:, None]
    wide = seq.to(tl.int64)
    q = tl.load(
        q_ptr + wide * q_token_stride + head[:, None] * q_head_stride + d[None, :],
        mask=there & (d < LATENT)[None, :], other=0.0,
    )  # fmt: skip
    rotated = tl.load(
        rotated_ptr + wide * r_token_stride + head[:, None] * r_head_stride + r[None, :],
        mask=there & (r < ROTARY)[None, :], other=0.0,
    )  # fmt: skip
    found, lse = _attend_vectors(
        q, rotated, cache_ptr, table, scale, start, end, head, block_stride, token_stride,
        LATENT, PADDED, ROTARY, PADDED_ROTARY, ROWS, BLOCK_SIZE, BLOCK_N, False, STAGES,
    )  # fmt: skip
    found = found * unit
    line = wide * HEADS + head
    mask = there & (d < LATENT)[None, :]
    if is_whole:
        tl.store(out_ptr + line[:, None] * LATENT + d[None, :], found.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = line * (extra + (1 << log_splits)) + extra + part
        tl.store(part_ptr + slot[:, None] * LATENT + d[None, :], found, mask=mask)
        tl.store(lse_ptr + slot, lse, mask=head < HEADS)


@triton.jit(
    do_not_specialize=["programs"],
    do_not_specialize_on_alignment=["row_ptr", "start_ptr", "length_ptr", "count_ptr", "seq_ptr", "number_ptr"],
)
def _latent_tile_kernel(
    q_ptr, rotated_ptr, cache_ptr, table_ptr, row_ptr, start_ptr, length_ptr, count_ptr, seq_ptr, number_ptr, out_ptr,
    scale, unit, programs, q_token_stride, q_head_stride, r_token_stride, r_head_stride, table_stride, block_stride,
    token_stride,
    HEADS: tl.constexpr, HEIGHT: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of HEIGHT tokens of a chunk with all their heads, ROWS of (token, head) at a time."""
    PIECES: tl.constexpr = (HEIGHT * HEADS + ROWS - 1) // ROWS
    await_previous(PDL)
    pieces = tl.load(count_ptr) * PIECES
    d = tl.arange(0, PADDED)
    r = tl.arange(0, PADDED_ROTARY)
    for done in range(tl.program_id(0), pieces, programs):
        at = pieces - 1 - done  # the last tiles of a chunk see most keys, so they come first
        seq = tl.load(seq_ptr + at // PIECES)
        q_start = tl.load(start_ptr + seq)
        num_q = tl.load(start_ptr + seq + 1) - q_start
        length = tl.load(length_ptr + seq)
        within = (at % PIECES) * ROWS + tl.arange(0, ROWS)
        query = tl.load(number_ptr + at // PIECES) * HEIGHT + within // HEADS
        there = ((within < HEIGHT * HEADS) & (query < num_q))[:, None]
        line = (q_start + query).to(tl.int64)
        head = within % HEADS
        q = tl.load(
            q_ptr + line[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :],
            mask=there & (d < LATENT)[None, :], other=0.0,
        )  # fmt: skip
        rotated = tl.load(
            rotated_ptr + line[:, None] * r_token_stride + head[:, None] * r_head_stride + r[None, :],
            mask=there & (r < ROTARY)[None, :], other=0.0,
        )  # fmt: skip
        table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
        limit = length - num_q + tl.minimum(query, num_q - 1) + 1
        found, _lse = _attend_vectors(
            q, rotated, cache_ptr, table, scale, 0, tl.max(limit, 0), limit, block_stride, token_stride,
            LATENT, PADDED, ROTARY, PADDED_ROTARY, ROWS, BLOCK_SIZE, BLOCK_N, True, STAGES,
        )  # fmt: skip
        place = out_ptr + (line * HEADS + head)[:, None] * LATENT + d[None, :]
        tl.store(place, (found * unit).to(out_ptr.dtype.element_ty), mask=there & (d < LATENT)[None, :])


def _shape(latent: int, kv_cache: torch.Tensor) -> dict[str, int]:
    rotary = kv_cache.shape[2] - latent
    return dict(
        LATENT=latent, PADDED=next_power_of_2(latent), ROTARY=rotary, PADDED_ROTARY=max(16, next_power_of_2(rotary)),
        BLOCK_SIZE=kv_cache.shape[1],
    )  # fmt: skip


def latent_decode(
    query: torch.Tensor,  # [sequences, heads, latent_dim], any strides but the last
    rotated: torch.Tensor,  # [sequences, heads, rotary_dim], any strides but the last
    kv_cache: torch.Tensor,  # [blocks, block_size, latent_dim + rotary_dim]
    tables: torch.Tensor,  # [rows, max_blocks] int32
    rows: torch.Tensor,  # [sequences]: the row of `tables` that belongs to each
    lengths: torch.Tensor,  # [sequences] int32; 0: a row whose output is left as it is
    out: torch.Tensor,  # [sequences, heads, latent_dim], contiguous
    workspace: Workspace,
    scale: float,
    unit: float = 1.0,  # what the cache holds is divided by this
    *,
    split: Split | None = None,
    longest: int | None = None,  # upper bound of the lengths
) -> None:
    """Weighted sums of the cached vectors, for one token of each sequence."""
    sequences, heads, latent = query.shape
    if is_hopper(query):
        from kvasir.kernels.triton import hopper_latent  # imports Gluon, which changes from version to version

        if hopper_latent.takes(query, rotated, kv_cache):
            hopper_latent.hopper_latent(
                query, rotated, kv_cache, tables, rows, lengths, out, workspace, scale * unit * LOG2E, unit, longest
            )
            return
    # A block of heads reads the vectors once. More heads in a block are more products for the same bytes; 16 are the
    # fewest that a tensor core takes.
    height = 16 if heads <= 16 else 32 if heads <= 32 else 64
    blocks = cdiv(heads, height)
    split = split or choose_split(sequences, blocks)
    if longest is not None and longest <= split.least:
        split = NO_SPLIT
    part, lse = workspace.get(sequences * heads * split.count, latent, query.device)
    parts = Parts(split, 0, None, part, lse)
    shape = _shape(latent, kv_cache)
    stages = 4 if kv_cache.itemsize * shape["PADDED"] * 32 <= 32768 else 2
    _latent_decode_kernel[(blocks, sequences, split.count)](
        query, rotated, kv_cache, tables, rows, lengths, out, part, lse, scale * unit * LOG2E, unit, *parts.numbers,
        query.stride(0), query.stride(1), rotated.stride(0), rotated.stride(1), tables.stride(0),
        kv_cache.stride(0), kv_cache.stride(1),
        HEADS=heads, ROWS=height, BLOCK_N=32, STAGES=stages, num_warps=4 if height < 64 else 8, num_stages=stages,
        **shape, **early(query),
    )  # fmt: skip
    merged = dict(
        HEADS=heads, DIM=latent, PADDED=shape["PADDED"], BLOCK_SIZE=shape["BLOCK_SIZE"], BLOCK_N=32, WINDOW=0,
        SHARES=False,
    )  # fmt: skip
    parts.merge(lengths, out, merged, None)


def latent_tiles(
    query: torch.Tensor,  # [tokens, heads, latent_dim]
    rotated: torch.Tensor,  # [tokens, heads, rotary_dim]
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,  # [sequences + 1] int32: sequence i has the queries starts[i]:starts[i + 1]
    lengths: torch.Tensor,  # [sequences] int32, its queries included
    tiles: Tiles,
    out: torch.Tensor,  # [tokens, heads, latent_dim]
    scale: float,
    unit: float = 1.0,
) -> None:
    """The same for the chunks of a step of which only the device knows what they are."""
    _, heads, latent = query.shape
    height = 64  # rows of a tile
    tokens = max(4, height // heads)  # Tiles.cut counts on tiles of a few tokens
    cut = tiles.cut(tokens)
    programs = min(max(1, cut.sequence.shape[0]) * cdiv(tokens * heads, height), TILE_PROGRAMS)
    _latent_tile_kernel[(programs,)](
        query, rotated, kv_cache, tables, rows, starts, lengths, cut.count, cut.sequence, cut.number, out,
        scale * unit * LOG2E, unit, programs, query.stride(0), query.stride(1), rotated.stride(0), rotated.stride(1),
        tables.stride(0), kv_cache.stride(0), kv_cache.stride(1),
        HEADS=heads, HEIGHT=tokens, ROWS=height, BLOCK_N=32, STAGES=2, num_warps=8, num_stages=2,
        **_shape(latent, kv_cache), **early(query),
    )  # fmt: skip


# ---------------------------------------------------------------- queries that meet keys and values


@dataclass(slots=True)
class Piece:
    """Tokens of some sequences, side by side: the keys and values that are computed at once. Arrays on the device."""

    sequence: torch.Tensor  # [segments] int32
    first: torch.Tensor  # [segments] int32: of the sequence's tokens
    begin: torch.Tensor  # [segments + 1] int32: where each segment begins in the piece, and the end
    tokens: int  # of the piece
    longest: int  # tokens of the longest segment


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "seq_ptr", "first_ptr", "begin_ptr"])
def _latent_gather_kernel(
    cache_ptr, out_ptr, table_ptr, row_ptr, seq_ptr, first_ptr, begin_ptr, unit, table_stride, block_stride,
    token_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(1)
    seq = tl.load(seq_ptr + segment)
    begin = tl.load(begin_ptr + segment)
    count = tl.load(begin_ptr + segment + 1) - begin
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    await_previous(PDL)
    token = tl.load(first_ptr + segment) + i
    table = table_ptr + tl.load(row_ptr + seq).to(tl.int64) * table_stride
    block = tl.load(table + token // BLOCK_SIZE, mask=i < count, other=0).to(tl.int64)
    at = block * block_stride + (token % BLOCK_SIZE) * token_stride
    mask = (i < count)[:, None] & (d < WIDTH)[None, :]
    x = tl.load(cache_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32) * unit
    to = (begin + i).to(tl.int64)[:, None] * WIDTH + d[None, :]
    tl.store(out_ptr + to, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "length_ptr", "seq_ptr", "first_ptr", "begin_ptr"])
def _latent_prefill_kernel(
    q_ptr, both_ptr, vector_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, seq_ptr, first_ptr, begin_ptr, scale,
    q_token_stride, q_head_stride,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, PADDED: tl.constexpr, VALUE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A head's queries of a chunk over one segment of its text. Segments come in the order of the text, and what the
    earlier ones gave is merged with."""
    await_previous(PDL)
    head = tl.program_id(0)
    segment = tl.program_id(2)
    seq = tl.load(seq_ptr + segment)
    first_token = tl.load(first_ptr + segment)
    begin = tl.load(begin_ptr + segment)
    count = tl.load(begin_ptr + segment + 1) - begin
    q_start = tl.load(start_ptr + seq)
    num_q = tl.load(start_ptr + seq + 1) - q_start
    length = tl.load(length_ptr + seq)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the longest tiles first: a shorter tail
    m = row + tl.arange(0, BLOCK_M)
    position = length - num_q + m
    last = tl.minimum(length - num_q + row + BLOCK_M, length) - first_token  # keys of the segment that some row sees
    if (row >= num_q) | (last <= 0):
        return
    d = tl.arange(0, PADDED)
    v = tl.arange(0, PADDED_VALUE)
    r = tl.arange(0, PADDED_ROTARY)
    n = tl.arange(0, BLOCK_N)
    line = (q_start + m).to(tl.int64)
    there = (m < num_q)[:, None]
    q_row = q_ptr + line[:, None] * q_token_stride + head * q_head_stride
    q = tl.load(q_row + d[None, :], mask=there & (d < PLAIN)[None, :], other=0.0)
    rotated = tl.load(q_row + PLAIN + r[None, :], mask=there & (r < ROTARY)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, PADDED_VALUE], tl.float32)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for at in tl.range(0, tl.minimum(last, count), BLOCK_N, num_stages=STAGES):
        valid = (at + n < count) & (first_token + at + n < length)  # a bound may be more than the length
        key = (begin + at + n).to(tl.int64)
        both = both_ptr + (key * HEADS + head)[:, None] * (PLAIN + VALUE)
        k = tl.load(both + d[None, :], mask=valid[:, None] & (d < PLAIN)[None, :], other=0.0)
        value = tl.load(both + PLAIN + v[None, :], mask=valid[:, None] & (v < VALUE)[None, :], other=0.0)
        turned = tl.load(
            vector_ptr + key[:, None] * (LATENT + ROTARY) + LATENT + r[None, :],
            mask=valid[:, None] & (r < ROTARY)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.dot(rotated, tl.trans(turned), s, input_precision="ieee") * scale
        s = tl.where(valid[None, :] & ((first_token + at + n)[None, :] <= position[:, None]), s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    to = out_ptr + (line * HEADS + head)[:, None] * VALUE + v[None, :]
    mask = there & (v < VALUE)[None, :]
    lse_at = lse_ptr + line * HEADS + head
    if first_token > 0:
        before = tl.load(lse_at, mask=m < num_q, other=0.0)
        earlier = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        # A row that sees nothing of this segment has a total of 0.
        best = tl.maximum(before, top)
        old = tl.exp2(before - best)
        new = tl.exp2(top - best)
        acc = acc * new[:, None] + earlier * old[:, None]
        total = total * new + old
        top = best
    tl.store(to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_at, top + tl.log2(total), mask=m < num_q)


def gather_vectors(
    kv_cache: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor, piece: Piece, dtype: torch.dtype, unit: float
) -> torch.Tensor:
    """What the cache holds of a piece's tokens, [tokens, latent_dim + rotary_dim]."""
    width = kv_cache.shape[2]
    out = torch.empty(piece.tokens, width, dtype=dtype, device=kv_cache.device)
    _latent_gather_kernel[(cdiv(piece.longest, 16), len(piece.sequence))](
        kv_cache, out, tables, rows, piece.sequence, piece.first, piece.begin, unit, tables.stride(0),
        kv_cache.stride(0), kv_cache.stride(1),
        WIDTH=width, PADDED=next_power_of_2(width), BLOCK_SIZE=kv_cache.shape[1], BLOCK=16, num_warps=4,
        **early(kv_cache),
    )  # fmt: skip
    return out


def latent_prefill(
    query: torch.Tensor,  # [tokens, heads, plain_dim + rotary_dim], any strides but the last
    both: torch.Tensor,  # [piece's tokens, heads, plain_dim + value_dim], contiguous: keys and values
    vectors: torch.Tensor,  # [piece's tokens, latent_dim + rotary_dim], contiguous
    starts: torch.Tensor,  # [chunks + 1] int32: chunk i has the queries starts[i]:starts[i + 1]
    lengths: torch.Tensor,  # [chunks] int32: tokens of each sequence, its chunk included
    longest: int,  # upper bound of a chunk's queries
    piece: Piece,
    out: torch.Tensor,  # [tokens, heads, value_dim], contiguous: the result so far
    lse: torch.Tensor,  # [tokens, heads] float32: log2 of the sums of weights so far
    scale: float,
    latent: int,
) -> None:
    heads, value = out.shape[1:]
    plain, rotary = both.shape[2] - value, vectors.shape[1] - latent
    block_m = 16 if longest <= 16 else 128 if query.element_size() == 2 else 64  # few variants to compile
    _latent_prefill_kernel[(heads, cdiv(longest, block_m), len(piece.sequence))](
        query, both, vectors, out, lse, starts, lengths, piece.sequence, piece.first, piece.begin, scale * LOG2E,
        query.stride(0), query.stride(1),
        HEADS=heads, PLAIN=plain, PADDED=max(16, next_power_of_2(plain)), VALUE=value,
        PADDED_VALUE=max(16, next_power_of_2(value)), LATENT=latent, ROTARY=rotary,
        PADDED_ROTARY=max(16, next_power_of_2(rotary)), BLOCK_M=block_m, BLOCK_N=64, STAGES=3,
        num_warps=8 if block_m == 128 else 4, num_stages=3, **early(query),
    )  # fmt: skip
