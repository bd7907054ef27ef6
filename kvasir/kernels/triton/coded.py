"""Products with quantized matrices (quantization.coded.Coded) that read codes, never a matrix written out.

One row: every program decodes a few rows of the matrix and adds up in float32; norm, activation and residual are done
on the way, as in linear.py. GPUs like the H200 have a kernel of their own for up to eight rows: see hopper_coded.py. A
few rows: codes become the operand of the tensor cores as they are, which is exact, and a group's scale and minimum are
applied to the sums of the group where a group is long, to the values where it is short. Many rows: the matrix is
expanded into memory that the product alone uses, at the speed of that memory, and cuBLAS multiplies. 8-bit floats by
row are multiplied as they are, with the inputs rounded to 8-bit floats, where the checkpoint says that its inputs are.

Codes are decoded without conversions from integers, which run at a quarter of the rate: their bits are placed in a
float whose exponent fits, and what is constant about that goes into the scale (FACTORS). Where there is assembly for
it, pairs of bfloat16 come out at once; scales are then applied to values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvasir.kernels.reference import LEVELS
from kvasir.kernels.triton.code_assembly import assembly
from kvasir.kernels.triton.launch import (
    await_previous,
    cdiv,
    early,
    gluon_is_known,
    is_hopper_or_newer,
    next_power_of_2,
)
from kvasir.kernels.triton.linear import COUNTS, find

MOST_ROWS = 256  # of x for the tensor-core kernel; above, the matrix is expanded
FLOAT_ROWS = 9  # of x from which the inputs of 8-bit floats are rounded, where the checkpoint says so
FLOAT_TILE_ROWS = 64  # of x for our own kernel; above, cuBLAS multiplies
FACTORS = {"e2m1": 2.0**14, "e4m3": 2.0**8}
_WIDE = 16384  # outputs that fill the device without splitting the inner dimension
_LONG_GROUP = 64  # from here on a group's sums are scaled, not its values
_PROCESSORS = 132


@triton.jit
def _decode(v, table_ptr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Bytes with one code each -> levels in float32, divided by the kind's factor."""
    if KIND == "e2m1":
        bits = ((v & 7).to(tl.int16) << 9) | ((v & 8).to(tl.int16) << 12)
        level = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        bits = ((v & 127).to(tl.int16) << 7) | ((v & 128).to(tl.int16) << 8)
        level = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "table":
        level = tl.load(table_ptr + v.to(tl.int32))
    else:  # whole numbers; i8 is around 128 once its sign bit is turned
        number = v.to(tl.int32)
        if KIND == "i8":
            number = number ^ 128
        level = (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
    return level


# ---------------------------------------------------------------- one row


@triton.jit
def _one_row(
    x_ptr, gain_ptr, codes_ptr, scale_ptr, min_ptr, table_ptr, n, inside, step,
    INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, SPAN: tl.constexpr, BLOCK_G: tl.constexpr, BY_ROW: tl.constexpr,
    MIN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What BLOCK_G groups add to each row's sum, [rows, groups, bytes], and the squares of x."""
    HALF: tl.constexpr = TILE // 2 if TILE else 1
    BYTES: tl.constexpr = GROUP // 2 if TILE else GROUP
    g = step * BLOCK_G + tl.arange(0, BLOCK_G)
    there = g < INNER // GROUP
    b = tl.arange(0, BYTES)
    low = (b // HALF) * TILE + b % HALF if TILE else b
    at = g[None, :, None] * GROUP + low[None, None, :]
    known = there[None, :, None] & (b >= 0)[None, None, :]
    codes = tl.load(
        codes_ptr + n[:, None, None].to(tl.int64) * WIDTH + g[None, :, None] * BYTES + b[None, None, :],
        mask=known & inside[:, None, None], other=0,
    )  # fmt: skip
    x = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x = x * tl.load(gain_ptr + at, mask=known, other=0.0).to(tl.float32)
    if TILE:
        high = tl.load(x_ptr + at + HALF, mask=known, other=0.0).to(tl.float32)
        squares += high * high
        if NORM:
            high = high * tl.load(gain_ptr + at + HALF, mask=known, other=0.0).to(tl.float32)
        product = _decode(codes & 15, table_ptr, KIND, OFFSET) * x + _decode(codes >> 4, table_ptr, KIND, OFFSET) * high
    else:
        product = _decode(codes, table_ptr, KIND, OFFSET) * x
    if not BY_ROW:
        where = n[:, None, None].to(tl.int64) * (INNER // GROUP // SPAN) + g[None, :, None] // SPAN
        kept = there[None, :, None] & inside[:, None, None]
        product = product * (tl.load(scale_ptr + where, mask=kept, other=0.0).to(tl.float32) * FACTOR)
        if MIN:
            lowest = tl.load(min_ptr + where, mask=kept, other=0.0).to(tl.float32)
            product += lowest * (x + high) if TILE else lowest * x
    return product, squares


@triton.jit
def _coded_gemv_kernel(
    x_ptr, codes_ptr, scale_ptr, min_ptr, row_ptr, table_ptr, bias_ptr, gain_ptr, add_ptr, y_ptr, outputs, eps,
    INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    BY_ROW: tl.constexpr, MIN: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < outputs
    BYTES: tl.constexpr = GROUP // 2 if TILE else GROUP
    await_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_G, BYTES], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_G, BYTES], tl.float32)
    squares = tl.zeros([1, BLOCK_G, BYTES], tl.float32)
    for step in tl.static_range((INNER // GROUP + BLOCK_G - 1) // BLOCK_G):
        more, square = _one_row(
            x_ptr, gain_ptr, codes_ptr, scale_ptr, min_ptr, table_ptr, n, inside, step,
            INNER, GROUP, WIDTH, TILE, KIND, OFFSET, FACTOR, SPAN, BLOCK_G, BY_ROW, MIN, NORM,
        )  # fmt: skip
        acc += more
        squares += square
        if GATED:
            more_up, _ = _one_row(
                x_ptr, gain_ptr, codes_ptr, scale_ptr, min_ptr, table_ptr, n + outputs, inside, step,
                INNER, GROUP, WIDTH, TILE, KIND, OFFSET, FACTOR, SPAN, BLOCK_G, BY_ROW, MIN, NORM,
            )  # fmt: skip
            acc_up += more_up
    y = tl.sum(tl.sum(acc, 2), 1)
    up = tl.sum(tl.sum(acc_up, 2), 1)
    if BY_ROW:
        y = y * (tl.load(scale_ptr + n, mask=inside, other=0.0).to(tl.float32) * FACTOR)
        if GATED:
            up = up * (tl.load(scale_ptr + outputs + n, mask=inside, other=0.0).to(tl.float32) * FACTOR)
    if ROW:
        y = y * tl.load(row_ptr + n, mask=inside, other=0.0)
        if GATED:
            up = up * tl.load(row_ptr + outputs + n, mask=inside, other=0.0)
    if NORM:
        size = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / INNER + eps)
        y = y * size
        up = up * size
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + outputs + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y += tl.load(add_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- a few rows


@triton.jit
def _of_groups(
    values_ptr, n, inside, at, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BYTES: tl.constexpr
):
    """The scales or minima of a tile: one for each row where a group is as long, or else one for each byte."""
    if GROUP >= BLOCK_K:
        one = tl.load(values_ptr + n.to(tl.int64) * GROUPS + at // GROUP, mask=inside, other=0.0)
        return one.to(tl.float32)[:, None]
    else:
        g = at // GROUP + tl.arange(0, BLOCK_K // GROUP)
        held = tl.load(values_ptr + n[:, None].to(tl.int64) * GROUPS + g[None, :], mask=inside[:, None], other=0.0)
        shape: tl.constexpr = [n.shape[0], BLOCK_K // GROUP, BYTES * GROUP // BLOCK_K]
        return tl.reshape(tl.broadcast_to(held.to(tl.float32)[:, :, None], shape), [n.shape[0], BYTES])


@triton.jit
def _scaled(w, scale, lowest, MIN: tl.constexpr):
    """bfloat16 times scales and plus minima, two at a time."""
    if MIN:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [w, scale.to(tl.bfloat16), lowest.to(tl.bfloat16)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [w, scale.to(tl.bfloat16)], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def _tile_sum(
    acc, x_ptr, matrix_ptr, scale_ptr, min_ptr, table_ptr, m, within, n, inside, at,
    INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, BLOCK_K: tl.constexpr, HOW: tl.constexpr, MIN: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """acc [outputs, rows of x] and what BLOCK_K inputs add to it."""
    HALF: tl.constexpr = TILE // 2 if TILE else 1
    BYTES: tl.constexpr = BLOCK_K // 2 if TILE else BLOCK_K
    GROUPS: tl.constexpr = INNER // GROUP
    b = tl.arange(0, BYTES)
    low = (b // HALF) * TILE + b % HALF if TILE else b
    codes = tl.load(
        matrix_ptr + n[:, None].to(tl.int64) * WIDTH + (at // 2 if TILE else at) + b[None, :],
        mask=inside[:, None], other=0,
    )  # fmt: skip
    rows = x_ptr + m[:, None].to(tl.int64) * INNER + at + low[None, :]
    x = tl.load(rows, mask=within[:, None], other=0.0)
    if TILE:
        x_high = tl.load(rows + HALF, mask=within[:, None], other=0.0)
    if HOW == "values":
        scale = _of_groups(scale_ptr, n, inside, at, GROUPS, GROUP, BLOCK_K, BYTES)
        lowest = _of_groups(min_ptr, n, inside, at, GROUPS, GROUP, BLOCK_K, BYTES) if MIN else scale
    if ASSEMBLY != "":
        if TILE:
            w, w_high = tl.inline_asm_elementwise(
                ASSEMBLY, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            w = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        if HOW == "values":
            w = _scaled(w, scale, lowest, MIN)
            if TILE:
                w_high = _scaled(w_high, scale, lowest, MIN)
    else:
        w = _decode(codes & 15 if TILE else codes, table_ptr, KIND, OFFSET) * FACTOR
        if TILE:
            w_high = _decode(codes >> 4, table_ptr, KIND, OFFSET) * FACTOR
        if HOW == "values":
            w = w * scale
            if TILE:
                w_high = w_high * scale
            if MIN:
                w += lowest
                if TILE:
                    w_high += lowest
    if HOW == "sums":
        total = tl.dot(w.to(x.dtype), tl.trans(x), input_precision="ieee")
        if TILE:
            total = tl.dot(w_high.to(x.dtype), tl.trans(x_high), total, input_precision="ieee")
        where = n.to(tl.int64) * GROUPS + at // GROUP
        acc += total * tl.load(scale_ptr + where, mask=inside, other=0.0).to(tl.float32)[:, None]
        if MIN:
            given = tl.sum(x.to(tl.float32), 1)
            if TILE:
                given += tl.sum(x_high.to(tl.float32), 1)
            acc += tl.load(min_ptr + where, mask=inside, other=0.0).to(tl.float32)[:, None] * given[None, :]
    else:
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
        if TILE:
            acc = tl.dot(w_high.to(x.dtype), tl.trans(x_high), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["count"])
def _coded_tile_kernel(
    x_ptr, codes_ptr, scale_ptr, min_ptr, row_ptr, table_ptr, bias_ptr, y_ptr, count, outputs,
    INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, HOW: tl.constexpr, MIN: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < outputs
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(part * (INNER // SPLIT), (part + 1) * (INNER // SPLIT), BLOCK_K, num_stages=STAGES):
        acc = _tile_sum(
            acc, x_ptr, codes_ptr, scale_ptr, min_ptr, table_ptr, m, m < count, n, inside, at,
            INNER, GROUP, WIDTH, TILE, KIND, OFFSET, FACTOR, BLOCK_K, HOW, MIN, ASSEMBLY,
        )  # fmt: skip
    if HOW == "rows":
        acc = acc * tl.load(scale_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if ROW:
        acc = acc * tl.load(row_ptr + n, mask=inside, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    y = y_ptr + (part * count + m)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=(m < count)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count"])
def _float_tile_kernel(
    x_ptr, w_desc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, count, outputs,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both sides are 8-bit floats, with a scale for each row of x and of the matrix."""
    await_previous(PDL)
    first = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(part * (INNER // SPLIT), (part + 1) * (INNER // SPLIT), BLOCK_K, num_stages=STAGES):
        w = w_desc.load([first, at])
        x = tl.load(x_ptr + m[:, None] * INNER + at + k[None, :], mask=(m < count)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    acc *= tl.load(scale_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    acc *= tl.load(x_scale_ptr + m, mask=m < count, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    y = y_ptr + (part * count + m)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=(m < count)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=["size"])
def _join_kernel(
    parts_ptr, bias_ptr, y_ptr, size, outputs,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + i, mask=i < size, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + i % outputs, mask=i < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty), mask=i < size)


# ---------------------------------------------------------------- experts


@triton.jit
def _grouped_coded_kernel(
    x_ptr, codes_ptr, scale_ptr, min_ptr, row_ptr, table_ptr, starts_ptr, tiles_ptr, y_ptr, outputs,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HOW: tl.constexpr, MIN: tl.constexpr, ROW: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    e = tl.arange(0, PADDED)
    before = tl.load(tiles_ptr + e, mask=e < EXPERTS, other=2147483647)  # tiles of experts 0 to e together
    expert = tl.sum((before <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    first_tile = tl.max(tl.where(e < expert, before, 0), 0)
    end = tl.load(starts_ptr + expert + 1)
    m = tl.load(starts_ptr + expert) + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < outputs
    n = expert * outputs + column
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, INNER, BLOCK_K):
        acc = _tile_sum(
            acc, x_ptr, codes_ptr, scale_ptr, min_ptr, table_ptr, m, m < end, n, inside, at,
            INNER, GROUP, WIDTH, TILE, KIND, OFFSET, FACTOR, BLOCK_K, HOW, MIN, ASSEMBLY,
        )  # fmt: skip
    if HOW == "rows":
        acc = acc * tl.load(scale_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if ROW:
        acc = acc * tl.load(row_ptr + n, mask=inside, other=0.0)[:, None]
    y = y_ptr + m[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & inside[None, :])


# ---------------------------------------------------------------- many rows


@triton.jit
def _expand_kernel(
    codes_ptr, scale_ptr, min_ptr, row_ptr, table_ptr, out_ptr, outputs,
    INNER: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, MIN: tl.constexpr,
    ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    HALF: tl.constexpr = TILE // 2 if TILE else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    known = (n < outputs)[:, None] & (b < WIDTH)[None, :]
    low = (b // HALF) * TILE + b % HALF if TILE else b
    codes = tl.load(codes_ptr + n[:, None].to(tl.int64) * WIDTH + b[None, :], mask=known, other=0)
    where = n[:, None].to(tl.int64) * (INNER // GROUP) + (low // GROUP)[None, :]
    scale = tl.load(scale_ptr + where, mask=known, other=0.0).to(tl.float32) * FACTOR
    if ROW:
        scale = scale * tl.load(row_ptr + n, mask=n < outputs, other=0.0)[:, None]
    lowest = tl.load(min_ptr + where, mask=known, other=0.0).to(tl.float32) if MIN else 0.0
    out = out_ptr + n[:, None].to(tl.int64) * INNER + low[None, :]
    value = _decode(codes & 15 if TILE else codes, table_ptr, KIND, OFFSET) * scale + lowest
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=known)
    if TILE:
        value = _decode(codes >> 4, table_ptr, KIND, OFFSET) * scale + lowest
        tl.store(out + HALF, value.to(out_ptr.dtype.element_ty), mask=known)


@triton.jit
def _round_rows_kernel(
    x_ptr, y_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows as 8-bit floats, each with its own scale."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    tl.store(y_ptr + row * WIDTH + i, (x / scale).to(y_ptr.dtype.element_ty), mask=i < WIDTH)
    tl.store(scale_ptr + row, scale)


# ---------------------------------------------------------------- launching


def _shape(matrix: Any) -> dict[str, Any]:
    """What all kernels are told of a matrix."""
    coding = matrix.coding
    kind, factor, offset = coding.kind, FACTORS.get(coding.kind, 1.0), coding.offset
    if kind in ("nf4", "fp4"):
        kind = "table"
    elif kind == "i8":
        offset = 128
    inner, width = matrix.shape[1], matrix.codes.shape[1]
    return {"INNER": inner, "WIDTH": width, "TILE": coding.tile, "KIND": kind, "OFFSET": offset, "FACTOR": factor}


def _pointers(matrix: Any) -> tuple[torch.Tensor, ...]:
    """Codes, scales, minima, rows and levels; those that it does not have are never read."""
    levels = matrix.codes
    if matrix.coding.kind in ("nf4", "fp4"):
        levels = _levels(matrix.coding.kind, matrix.codes.device)
    lowest = matrix.scale if matrix.minimum is None else matrix.minimum
    return matrix.codes, matrix.scale, lowest, matrix.scale if matrix.row is None else matrix.row, levels


@cache
def _levels(kind: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(LEVELS[kind], dtype=torch.float32, device=device)


def _power_below(number: int, most: int) -> int:
    """The largest power of two that divides a number, up to `most`."""
    return min(number & -number, most)


def is_coded_fit(matrix: Any) -> bool:
    """Whether the kernels for one row and for a few can take a matrix: its groups must be divided by powers of two."""
    group, tile, inner = matrix.coding.group, matrix.coding.tile, matrix.shape[1]
    unit = _power_below(inner if matrix.scale.shape[1] == 1 else group, 128)
    fits = unit >= max(tile, 16) and (matrix.scale.shape[1] == 1 or group >= _LONG_GROUP or group == unit)
    return fits and _steps(matrix, fast=False)[1] >= (32 if tile else 16)  # tensor cores take 16 inputs from each half


def _takes_few_rows(x: torch.Tensor, matrix: Any) -> bool:
    return is_hopper_or_newer(x) and gluon_is_known() and bool(_hopper().takes(x, matrix))


def _hopper() -> Any:
    from kvasir.kernels.triton import hopper_coded  # imports Gluon, which changes from version to version

    return hopper_coded


def coded_gemv(
    x: torch.Tensor,  # [1, inputs], contiguous; on GPUs like the H200 up to eight rows
    matrix: Any,  # Coded
    bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    add: torch.Tensor | None = None,
    gated: bool = False,
    blocks: list[int] | None = None,  # rows of the matrix and bytes of each per step, warps; None: as measured
) -> torch.Tensor:
    """See linear.gemv."""
    if blocks is None and _takes_few_rows(x, matrix):
        found: torch.Tensor = _hopper().few_rows(x, matrix, bias, gain=gain, eps=eps, add=add, gated=gated)
        return found
    rows = matrix.shape[0]
    outputs, by_row = rows // 2 if gated else rows, matrix.scale.shape[1] == 1 and matrix.minimum is None
    group = _power_below(matrix.coding.group, 128)  # of the kernel: as many as a scale's, or a part of them
    block_n, step, warps = blocks or find(coded_key("gemv", matrix, 1), x) or [2 if gated else 4, 512, 4]
    shape = _shape(matrix)
    group_bytes = group // 2 if shape["TILE"] else group
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    codes, scale, lowest, factors, levels = _pointers(matrix)
    _coded_gemv_kernel[(cdiv(outputs, block_n),)](
        x, codes, scale, lowest, factors, levels, x if bias is None else bias, x if gain is None else gain,
        x if add is None else add, y, outputs, eps,
        GROUP=group, SPAN=matrix.coding.group // group, BLOCK_N=block_n, BLOCK_G=max(1, step // group_bytes),
        BY_ROW=by_row, MIN=matrix.minimum is not None, ROW=matrix.row is not None, BIAS=bias is not None,
        NORM=gain is not None, ADD=add is not None, GATED=gated,
        num_warps=warps, **shape, **early(x),
    )  # fmt: skip
    return y


def _steps(matrix: Any, *, fast: bool) -> tuple[str, int]:
    """How scales are applied, and how many inputs a step of the tensor-core kernels takes. `fast`: codes are decoded by
    assembly, after which to scale values costs less than to scale sums."""
    group, inner = matrix.coding.group, matrix.shape[1]
    if matrix.scale.shape[1] == 1:
        # a minimum for the whole row needs the sum of x, as a long group does
        long = "values" if fast else "sums"
        return ("rows" if matrix.minimum is None else long), _power_below(inner, 128)
    if group >= _LONG_GROUP:
        return ("values" if fast else "sums"), _power_below(group, 128)
    return "values", _power_below(inner, 128)


def _assembly(x: torch.Tensor, matrix: Any) -> str:
    if x.dtype != torch.bfloat16 or not is_hopper_or_newer(x):
        return ""
    packed = matrix.coding.kind in ("u4", "e2m1")
    return assembly(matrix.coding.kind, matrix.coding.offset) if packed == bool(matrix.coding.tile) else ""


def coded_parts(
    x: torch.Tensor, matrix: Any, bias: torch.Tensor | None, blocks: list[int], *, joins: bool
) -> torch.Tensor:
    """[parts, rows, outputs] in float32, whose sum is the product, or [rows, outputs] in x's type where there is one
    part. `blocks`: outputs per tile, warps, stages, parts."""
    (outputs, inner), rows = matrix.shape, x.shape[0]
    block_n, warps, stages, split = blocks
    assembly = _assembly(x, matrix)
    how, block_k = _steps(matrix, fast=bool(assembly))
    while inner % (split * block_k):
        split -= 1
    block_m = min(64, max(16, next_power_of_2(rows)))
    whole = split == 1 and joins
    y = torch.empty(
        (rows, outputs) if whole else (split, rows, outputs), dtype=x.dtype if whole else torch.float32, device=x.device
    )
    codes, scale, lowest, factors, levels = _pointers(matrix)
    _coded_tile_kernel[(cdiv(outputs, block_n), split, cdiv(rows, block_m))](
        x, codes, scale, lowest, factors, levels, x if bias is None else bias, y, rows, outputs,
        GROUP=matrix.coding.group, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=split, HOW=how,
        MIN=matrix.minimum is not None, ROW=matrix.row is not None, BIAS=bias is not None and whole,
        ASSEMBLY=assembly, STAGES=stages,
        num_warps=warps, num_stages=stages, **_shape(matrix), **early(x),
    )  # fmt: skip
    return y


def _blocks(x: torch.Tensor, matrix: Any) -> list[int]:
    """As measured, or enough parts of the inner dimension to fill the device twice."""
    rows = x.shape[0]
    count = next(count for count in COUNTS if rows <= count)
    found = find(coded_key("tile", matrix, count), x)
    if found is not None:
        return found
    outputs, inner = matrix.shape
    if _assembly(x, matrix):
        if outputs >= _WIDE and rows > 16:
            return [128, 8, 4, 1]
        block = 128 if matrix.coding.group < _LONG_GROUP else 64
        return [block, 4, 4, _parts(outputs, 64, rows, inner, 4, fills=6)]
    return [64, 4, 4, _parts(outputs, 64, rows, inner, 8)]


def _parts(outputs: int, block: int, rows: int, inner: int, most: int, fills: int = 2) -> int:
    """Enough parts of the inner dimension to fill the device so many times. They change with powers of two of the rows,
    which are compiled before the first request."""
    tiles = cdiv(outputs, block) * next_power_of_2(cdiv(rows, 64))
    return max(1, min(most, fills * _PROCESSORS // tiles, inner // 512))


def coded_key(kernel: str, matrix: Any, count: int) -> str:
    rows, inner = matrix.shape
    group = "rows" if matrix.scale.shape[1] == 1 else f"g{matrix.coding.group}"
    return f"{kernel} {matrix.coding.kind} {group} {rows}x{inner} for {count}"


def expand_coded(matrix: Any, dtype: torch.dtype) -> torch.Tensor:
    """See Coded.expand; columns stay in the matrix's own order."""
    outputs, inner = matrix.shape
    out = torch.empty(outputs, inner, dtype=dtype, device=matrix.codes.device)
    codes, scale, lowest, factors, levels = _pointers(matrix)
    _expand_kernel[(cdiv(outputs, 8), cdiv(codes.shape[1], 512))](
        codes, scale, lowest, factors, levels, out, outputs,
        GROUP=matrix.coding.group, BLOCK_N=8, BLOCK_B=512, MIN=matrix.minimum is not None, ROW=matrix.row is not None,
        num_warps=4, **_shape(matrix), **early(out),
    )  # fmt: skip
    return out


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, inputs], contiguous -> the same in 8-bit floats, and the scale of each row, [rows, 1]."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    _round_rows_kernel[(rows,)](
        x, y, scale, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512)), **early(x)
    )
    return y, scale


def _takes_floats(x: torch.Tensor, matrix: Any) -> bool:
    """Whether the codes are multiplied as they are."""
    outputs, inner = matrix.shape
    coding = matrix.coding
    by_row = coding.kind == "e4m3" and matrix.scale.shape[1] == 1
    return by_row and coding.inputs == "e4m3" and x.shape[0] >= FLOAT_ROWS and not (outputs % 16 or inner % 16)


def _multiply_floats(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None) -> torch.Tensor:
    if _takes_float_tiles(x, matrix):
        return _join(float_parts(x, matrix, bias, joins=True), bias, x)
    rounded, scale = round_rows(x)
    weight = matrix.codes.view(torch.float8_e4m3fn).t()
    y: torch.Tensor = torch._scaled_mm(
        rounded, weight, scale_a=scale, scale_b=matrix.scale.float().t(), out_dtype=x.dtype, use_fast_accum=True
    )
    return y if bias is None else y + bias


def _takes_float_tiles(x: torch.Tensor, matrix: Any) -> bool:
    return is_hopper_or_newer(x) and x.shape[0] <= FLOAT_TILE_ROWS and matrix.shape[1] % 128 == 0


def float_parts(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None, *, joins: bool) -> torch.Tensor:
    """As coded_parts, for 8-bit floats by row, with inputs rounded to the same."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (outputs, inner), rows, block_n, block_k = matrix.shape, x.shape[0], 64, 128
    split = _parts(outputs, block_n, rows, inner, 4)
    while inner % (split * block_k):
        split -= 1
    rounded, scale = round_rows(x)
    whole = split == 1 and joins
    y = torch.empty(
        (rows, outputs) if whole else (split, rows, outputs), dtype=x.dtype if whole else torch.float32, device=x.device
    )
    codes = matrix.codes.view(torch.float8_e4m3fn)
    _float_tile_kernel[(cdiv(outputs, block_n), split, cdiv(rows, 64))](
        rounded, TensorDescriptor(codes, [outputs, inner], [inner, 1], [block_n, block_k]), scale, matrix.scale,
        x if bias is None else bias, y, rows, outputs,
        INNER=inner, BLOCK_M=min(64, max(16, next_power_of_2(rows))), BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=split,
        BIAS=bias is not None and whole, STAGES=5, num_warps=4, num_stages=5, **early(x),
    )  # fmt: skip
    return y


def _join(y: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The sum of parts, or what is whole already."""
    if y.dim() == 2:
        return y
    parts, rows, outputs = y.shape
    joined = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _join_kernel[(cdiv(rows * outputs, 1024),)](
        y, y if bias is None else bias, joined, rows * outputs, outputs,
        PARTS=parts, BIAS=bias is not None, BLOCK=1024, num_warps=4, **early(x),
    )  # fmt: skip
    return joined


def _arranged(x: torch.Tensor, matrix: Any) -> torch.Tensor:
    """x with its columns in the matrix's order, times their factors."""
    if matrix.column is not None:
        x = x * matrix.column.to(x.dtype)
    return (x if matrix.order is None else x.index_select(1, matrix.order)).contiguous()


def coded_linear(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See reference.coded_linear."""
    x = _arranged(x, matrix)
    rows = x.shape[0]
    if _takes_floats(x, matrix):
        return _multiply_floats(x, matrix, bias)
    if rows > MOST_ROWS or not is_coded_fit(matrix):
        return torch.nn.functional.linear(x, expand_coded(matrix, x.dtype), bias)
    if rows == 1 or _takes_few_rows(x, matrix):
        return coded_gemv(x, matrix, bias)
    return _join(coded_parts(x, matrix, bias, _blocks(x, matrix), joins=True), bias, x)


def coded_linear_parts(x: torch.Tensor, matrix: Any) -> torch.Tensor:
    """The product, or parts of it that add_rms_norm sums."""
    if 1 < x.shape[0] <= MOST_ROWS and is_coded_fit(matrix) and not _takes_few_rows(x, matrix):
        if not _takes_floats(x, matrix):
            blocks = _blocks(x, matrix)
            if blocks[-1] > 1:
                return coded_parts(_arranged(x, matrix), matrix, None, blocks, joins=False)
        elif _takes_float_tiles(x, matrix):
            return float_parts(_arranged(x, matrix), matrix, None, joins=False)
    return coded_linear(x, matrix)


def grouped_coded_linear(x: torch.Tensor, matrices: Any, starts: torch.Tensor) -> torch.Tensor:
    """See reference.grouped_coded_linear. x must be contiguous."""
    groups, rows = len(starts) - 1, len(x)
    outputs = matrices.shape[0] // groups
    assert is_coded_fit(matrices), "others are expanded when they are loaded"
    per_group = rows // groups  # if rows are spread evenly
    block_m = 16 if per_group <= 16 else 64
    counts = starts[1:] - starts[:-1]
    tiles = torch.cumsum((counts + (block_m - 1)) // block_m, 0, dtype=torch.int32)
    most = min(rows, cdiv(rows, block_m) + groups)  # every group may have one tile that is not full
    assembly = _assembly(x, matrices)
    how, block_k = _steps(matrices, fast=bool(assembly))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    codes, scale, lowest, factors, levels = _pointers(matrices)
    _grouped_coded_kernel[(cdiv(outputs, 64), most)](
        x, codes, scale, lowest, factors, levels, starts, tiles, y, outputs,
        EXPERTS=groups, PADDED=next_power_of_2(groups), GROUP=matrices.coding.group, BLOCK_M=block_m, BLOCK_N=64,
        BLOCK_K=block_k, HOW=how, MIN=matrices.minimum is not None, ROW=matrices.row is not None,
        ASSEMBLY=assembly, num_warps=4, num_stages=3, **_shape(matrices),
    )  # fmt: skip
    return y
