"""Updates of the paged cache and of a step's inputs: norm, rotary embedding and store of keys and values in one launch,
copies of blocks, and the inputs of decode steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _rope_store_kernel(
    qkv_ptr, q_ptr, cache_ptr, q_gain_ptr, k_gain_ptr, position_ptr, slot_ptr, table_ptr, eps, k_scale, v_scale,
    block_stride, value_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, QK_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP heads a program, all of one kind (GROUP divides HEADS and KV_HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    head = first + tl.arange(0, GROUP)
    d = tl.arange(0, PADDED)
    inside = (d < DIM)[None, :]
    HALF: tl.constexpr = ROTARY // 2
    # each element's partner in the rotation, their angle, and whether it is the left one of the two
    if INTERLEAVED:
        partner = tl.where(d < ROTARY, d ^ 1, d)
        angle = d // 2
        left = d % 2 == 0
    else:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
        angle = tl.where(d < HALF, d, d - HALF)
        left = d < HALF
    slot = tl.load(slot_ptr + token, cache_modifier=".cg")
    turned = d < ROTARY
    cos = 1.0
    sin = 0.0
    dtype = q_ptr.dtype.element_ty
    if ROTARY > 0:
        position = tl.load(position_ptr + token, cache_modifier=".cg")
        table = table_ptr + position * ROTARY + tl.where(turned, angle, 0)
        cos = tl.where(turned, tl.load(table).to(dtype).to(tl.float32), 1.0)[None, :]
        sin = tl.where(turned, tl.load(table + HALF).to(dtype).to(tl.float32), 0.0)[None, :]
    await_previous(PDL)
    row = qkv_ptr + token * (HEADS + 2 * KV_HEADS) * DIM + head[:, None] * DIM
    x = tl.load(row + d[None, :], mask=inside, other=0.0)
    if first < HEADS + KV_HEADS:
        # the other half of the rotation is loaded again; it is in the processor's cache
        y = tl.load(row + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if QK_NORM:
            gain_ptr = k_gain_ptr
            if first < HEADS:
                gain_ptr = q_gain_ptr
            scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            gain = tl.load(gain_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            other_gain = tl.load(gain_ptr + partner, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            rounded = q_gain_ptr.dtype.element_ty
            x = ((x * scale).to(rounded).to(tl.float32) * gain).to(dtype).to(tl.float32)
            y = ((y * scale).to(rounded).to(tl.float32) * other_gain).to(dtype).to(tl.float32)
        if ROTARY > 0:
            x = x * cos + y * tl.where(left, -1.0, 1.0)[None, :] * sin
        x = x.to(dtype)
    if first < HEADS:
        tl.store(q_ptr + token * HEADS * DIM + head[:, None] * DIM + d[None, :], x, mask=inside)
    elif slot >= 0:
        at = cache_ptr + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
        kv_head = head - HEADS
        unit = k_scale
        if first >= HEADS + KV_HEADS:
            at += value_stride
            kv_head = head - HEADS - KV_HEADS
            unit = v_scale
        stored = x
        if LIMIT > 0:  # 8-bit floats: values that are too large become the largest one
            stored = tl.minimum(tl.maximum(x.to(tl.float32) / unit, -LIMIT), LIMIT).to(cache_ptr.dtype.element_ty)
        tl.store(at + kv_head[:, None] * head_stride + d[None, :], stored, mask=inside)


def rope_store(
    qkv: torch.Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim], contiguous
    heads: int,
    positions: torch.Tensor,  # [tokens]
    table: torch.Tensor | None,  # [positions, rotary_dim] float32: cosines, then sines; None: nothing is rotated
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim]
    slots: torch.Tensor,  # [tokens] int64; negative: stored nowhere
    q_gain: torch.Tensor | None = None,
    k_gain: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The rotated queries [tokens, heads, head_dim]. Keys and values are in the cache afterwards."""
    _, _, block_size, kv_heads, dim = kv_cache.shape
    query = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
    group = 1
    while group < 4 and kv_heads % (2 * group) == 0 and heads % (2 * group) == 0:
        group *= 2
    norm = q_gain is not None
    _rope_store_kernel[(len(qkv), (heads + 2 * kv_heads) // group)](
        qkv, query, kv_cache, q_gain if norm else qkv, k_gain if norm else qkv, positions, slots,
        qkv if table is None else table, eps, k_scale, v_scale,
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PADDED=next_power_of_2(dim),
        ROTARY=0 if table is None else table.shape[1], BLOCK_SIZE=block_size, GROUP=group, QK_NORM=norm,
        INTERLEAVED=interleaved,
        LIMIT=torch.finfo(kv_cache.dtype).max if kv_cache.itemsize == 1 else 0.0, num_warps=1, **early(qkv),
    )  # fmt: skip
    return query


# ----------------------------------------------------------------
# Copies KV blocks, all layers of all of them in one launch: within a pool, or between a pool and a staging buffer.

CHUNK = 1024  # words that one program copies
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_blocks_kernel(
    source_ptr,
    target_ptr,
    source_index_ptr,
    target_index_ptr,
    source_index_stride,
    target_index_stride,
    source_layer,
    source_block,
    target_layer,
    target_block,
    words,
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    taken = tl.load(source_index_ptr + pair * source_index_stride).to(tl.int64)
    given = tl.load(target_index_ptr + pair * target_index_stride).to(tl.int64)
    page = tl.load(source_ptr + layer * source_layer + taken * source_block + word, mask=inside, other=0)
    tl.store(target_ptr + layer * target_layer + given * target_block + word, page, mask=inside)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_index: torch.Tensor, target_index: torch.Tensor
) -> None:
    """See reference.copy_blocks. Pages are contiguous bytes; layers and blocks may lie in any order."""
    layers, _, page_bytes = source.shape
    word = next(kind for kind in WORDS if page_bytes % kind.itemsize == 0)
    source, target = source.view(word), target.view(word)
    words = source.shape[2]
    grid = len(source_index), layers, cdiv(words, CHUNK)
    _copy_blocks_kernel[grid](
        source,
        target,
        source_index,
        target_index,
        source_index.stride(0),
        target_index.stride(0),
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        words,
        CHUNK=CHUNK,
        num_warps=4,
    )


# ----------------------------------------------------------------
# The inputs of a step in which every row runs one token, read from the rows on the device.


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["row_ptr", "position_ptr", "slot_ptr"])
def _decode_inputs_kernel(
    row_ptr, computed_ptr, next_ptr, table_ptr, id_ptr, position_ptr, slot_ptr, length_ptr, count, padding_row,
    table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(row_ptr + i, mask=inside, other=0)
    real = inside & (row != padding_row)
    position = tl.load(computed_ptr + row, mask=real, other=0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    token = tl.load(next_ptr + row, mask=real, other=0)
    tl.store(id_ptr + i, token.to(tl.int64), mask=inside)
    tl.store(position_ptr + i, position.to(tl.int64), mask=inside)
    tl.store(slot_ptr + i, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)
    tl.store(length_ptr + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(computed_ptr + row, position + 1, mask=real)


def decode_inputs(
    rows: torch.Tensor,  # [n] int64, each at most once but for `padding_row`
    lengths: torch.Tensor,  # [n] int32: lengths after the step are written here
    padding_row: int,  # gets slot -1 and length 0
    num_computed: torch.Tensor,  # [rows] int32, counted up
    next_token: torch.Tensor,  # [rows] int32
    tables: torch.Tensor,  # [rows, max_blocks] int32
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input ids, positions and slots, [n] int64."""
    n = len(rows)
    ids, positions, slots = torch.empty(3, n, dtype=torch.int64, device=rows.device)
    block = 128  # one variant for all sizes
    _decode_inputs_kernel[(cdiv(n, block),)](
        rows, num_computed, next_token, tables, ids, positions, slots, lengths, n, padding_row, tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK=block, num_warps=1, **early(rows),
    )  # fmt: skip
    return ids, positions, slots
