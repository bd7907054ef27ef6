"""Adapters of a linear layer in two launches: tokens times the first factors of their slots, then times the second.

As with experts, tokens are sorted by slot and cut into tiles of one slot (kernels/layout.py), once a step. Programs go
through as many tiles as there are, so the launches can sit in a graph that serves any mix of adapters. A few programs
are too few to read a long row of inputs at the memory's speed, so the first product is cut into parts along its inputs,
which the second one sums in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.layout import TILE, AdapterMatrices, TokenSlots
from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2

SPLITS = 16  # parts of the inputs, so that few tokens keep many processors busy
RANK_BLOCK = 64  # ranks above this are multiplied in pieces
MAX_PARTS = 3  # of a layer's outputs: queries, keys and values
_FILL = 8 * 132  # programs that an H200 runs at once


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _shrink_kernel(
    x_ptr, shrink_ptr, tiles_ptr, order_ptr, uses_ptr, low_ptr, tokens, tiles,
    INPUTS: tl.constexpr, LOW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3, cache_modifier=".cg")
    await_previous(PDL)
    while slot >= 0:
        if tl.load(uses_ptr + slot * 2) != 0:
            place = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
            real = place < tl.load(tiles_ptr + tile * 3 + 2)
            row = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
            matrix = shrink_ptr + slot.to(tl.int64) * LOW * INPUTS
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for at in range(split * SPLIT, min(split * SPLIT + SPLIT, INPUTS), BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                inside = k < INPUTS
                x = tl.load(x_ptr + row[:, None] * INPUTS + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
                w = tl.load(
                    matrix + n[:, None] * INPUTS + k[None, :], mask=(n < LOW)[:, None] & inside[None, :], other=0.0
                )
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
            out = low_ptr + (split.to(tl.int64) * tokens + place[:, None]) * LOW + n[None, :]
            tl.store(out, acc, mask=real[:, None] & (n < LOW)[None, :])
        tile += tl.num_programs(0)
        slot = tl.load(tiles_ptr + tile * 3, mask=tile < tiles, other=-1)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _expand_kernel(
    low_ptr, expand_ptr, gain_ptr, shift_ptr, tiles_ptr, order_ptr, uses_ptr, y_ptr, tokens, tiles,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    # blocks of outputs never cross from one part to the next
    blocks_first: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    blocks_second: tl.constexpr = (SECOND + BLOCK_N - 1) // BLOCK_N
    part = (block >= blocks_first).to(tl.int32) + (block >= blocks_first + blocks_second).to(tl.int32)
    within = block - tl.where(part == 0, 0, tl.where(part == 1, blocks_first, blocks_first + blocks_second))
    begin = tl.where(part == 0, 0, tl.where(part == 1, FIRST, FIRST + SECOND))
    size = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, THIRD))
    own = within * BLOCK_N + tl.arange(0, BLOCK_N)
    n, inside = begin + own, own < size
    r = tl.arange(0, BLOCK_R)
    # The factors of the first tile are on their way while the product with the others still runs. What is read before
    # `await_previous` is read past the processor's own cache: see launch.py.
    slot = tl.load(tiles_ptr + tile * 3, cache_modifier=".cg")
    rank = tl.load(uses_ptr + slot * 2, mask=slot >= 0, other=0, cache_modifier=".cg")
    w = _factors(expand_ptr, slot, r, n, rank, inside, RANK, OUTPUTS)
    await_previous(PDL)
    while slot >= 0:
        is_moved = tl.load(uses_ptr + slot * 2 + 1)
        if (rank != 0) | (is_moved != 0):
            place = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
            real = place < tl.load(tiles_ptr + tile * 3 + 2)
            row = tl.load(order_ptr + place, mask=real, other=0).to(tl.int64)
            mask = real[:, None] & inside[None, :]
            y = tl.load(y_ptr + row[:, None] * OUTPUTS + n[None, :], mask=mask, other=0.0).to(tl.float32)
            if is_moved != 0:
                at_slot = slot.to(tl.int64) * OUTPUTS + n
                gain = tl.load(gain_ptr + at_slot, mask=inside, other=1.0)
                shift = tl.load(shift_ptr + at_slot, mask=inside, other=0.0)
                y = y * gain[None, :] + shift[None, :]
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for at in range(0, rank, BLOCK_R):
                if at > 0:
                    w = _factors(expand_ptr, slot, at + r, n, rank, inside, RANK, OUTPUTS)
                low = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    line = (tokens * split + place[:, None]).to(tl.int64) * (PARTS * RANK)
                    known = real[:, None] & (at + r < rank)[None, :]
                    low += tl.load(low_ptr + line + part * RANK + at + r[None, :], mask=known, other=0.0)
                acc = tl.dot(low.to(w.dtype), w, acc, input_precision="ieee")
            tl.store(y_ptr + row[:, None] * OUTPUTS + n[None, :], (y + acc).to(y_ptr.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)
        slot = tl.load(tiles_ptr + tile * 3, mask=tile < tiles, other=-1)
        rank = tl.load(uses_ptr + slot * 2, mask=slot >= 0, other=0)
        w = _factors(expand_ptr, slot, r, n, rank, inside, RANK, OUTPUTS)


@triton.jit
def _factors(expand_ptr, slot, r, n, rank, inside, RANK: tl.constexpr, OUTPUTS: tl.constexpr):
    """A tile of a slot's second factors; zeros where it has none."""
    matrix = expand_ptr + tl.maximum(slot, 0).to(tl.int64) * RANK * OUTPUTS
    known = (r < rank)[:, None] & inside[None, :]
    return tl.load(matrix + r[:, None] * OUTPUTS + n[None, :], mask=known, other=0.0, cache_modifier=".cg")


def _programs(tiles: int, others: int) -> int:
    """Programs that go through the tiles, beside so many for each: enough to fill the device. Most steps have far fewer
    tiles than they might have, and a program that finds none costs as much as its start."""
    return min(tiles, max(8, cdiv(_FILL, others)))


def adapt(x: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, slots: TokenSlots) -> torch.Tensor:
    """See reference.adapt. y must be contiguous and is overwritten."""
    assert len(matrices.parts) <= MAX_PARTS, "queries, keys and values are the most parts that a layer has"
    x = x.contiguous()
    tokens, inputs = x.shape
    outputs, rank, parts = y.shape[1], matrices.rank, len(matrices.parts)
    tiles, order = slots.tiles
    low_size = parts * rank
    low = torch.empty(SPLITS, tokens, low_size, dtype=torch.float32, device=x.device)
    block_n = min(64, max(16, next_power_of_2(low_size)))
    block_k = 256 if inputs >= 4096 else 128 if inputs >= 1024 else 32
    split = cdiv(cdiv(inputs, SPLITS), block_k) * block_k
    columns, count = cdiv(low_size, block_n), len(tiles)
    _shrink_kernel[(_programs(count, columns * SPLITS), columns, SPLITS)](
        x, matrices.shrink, tiles, order, matrices.uses, low, tokens, count,
        INPUTS=inputs, LOW=low_size, SPLIT=split,
        BLOCK_M=TILE, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3, **early(x),
    )  # fmt: skip
    sizes = (*matrices.parts, *[0] * (MAX_PARTS - parts))
    width = 128 if outputs >= 1024 else 32
    blocks = sum(cdiv(size, width) for size in sizes)
    _expand_kernel[(_programs(count, blocks), blocks)](
        low, matrices.expand, matrices.gain, matrices.shift, tiles, order, matrices.uses, y, tokens, count,
        OUTPUTS=outputs, RANK=rank, PARTS=parts, SPLITS=SPLITS, FIRST=sizes[0], SECOND=sizes[1], THIRD=sizes[2],
        BLOCK_M=TILE, BLOCK_N=width, BLOCK_R=min(RANK_BLOCK, max(16, next_power_of_2(rank))), num_warps=4,
        **early(x),
    )  # fmt: skip
    return y
