"""Products of a few rows with quantized matrices for GPUs like the H200, in Gluon.

At this size only the bytes of the matrix should count. Its codes go from memory to registers, 16 bytes of a row to a
lane, and stay there: no shared memory, and the next steps' codes are on their way while one is computed. A few bit
operations make pairs of bfloat16 of them (code_assembly.py), and the tensor cores take those as they lie: the inputs
are read in the order in which the lanes hold them. Warps share rows, each with inputs of its own, and add up their sums
at the end.

On an H200 with 4-bit codes in groups of 128, one row, as in a layer of 8B with norm and activation: qkv 9.6 us, o 7.5,
gate_up 30.0, down 16.2; with the kernel for other devices 15.4, 9.7, 54.5, 40.4; by bytes 3.0, 2.0, 14.2, 7.1.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvasir.kernels.triton.code_assembly import assembly
from kvasir.kernels.triton.launch import cdiv, early

MOST_ROWS = 8  # of x: the short side of the tensor cores' smallest tile
STEP = gl.constexpr(64)  # bytes of a row that a warp takes at once: four lanes with 16 each
ROWS = 16  # of the matrix that a program computes
_MOST_STEPS = 64  # they are unrolled
_PROCESSORS = 132


SCALE = gl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
SCALE_AND_ADD = gl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")


# ---------------------------------------------------------------- layouts


@gluon.constexpr_function
def _lanes_layout(warps, rows, size):
    """[warps, rows, 64 / size]: what belongs to the 16 bytes of a row that a lane holds, in units of `size` bytes.
    Lanes go along a row, then down eight rows; the other eight rows are the same lanes' again."""
    own = [[0, 0, byte // size] for byte in (1, 2, 4, 8) if byte >= size]
    own += [[0, row, 0] for row in (8, 16, 32) if row < rows]
    lanes = [[0, 0, 16 // size], [0, 0, 32 // size], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    own_warps = [[w, 0, 0] for w in (1, 2, 4) if w < warps]
    return gl.DistributedLinearLayout(own, lanes, own_warps, [], [warps, rows, 64 // size])


@gluon.jit
def _place(first, L: gl.constexpr, WARPS: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr):
    """The warp, row of the matrix and place in the step of each element: [W, 1, 1], [1, N, 1], [1, 1, C]."""
    w = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L))), 1), 2)
    n = gl.expand_dims(gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(0, L))), 0), 0)
    return w, first + n, c


@gluon.jit
def _operand(w, A: gl.constexpr, WARPS: gl.constexpr, N: gl.constexpr):
    """64 numbers of each row, from the order of bytes to that of the tensor cores. Nothing moves."""
    w = gl.permute(gl.reshape(w, [WARPS, N, 4, 2, 8]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(w, [WARPS, N, STEP]), A, assert_trivial=True)


@gluon.jit
def _of_bytes(values, L: gl.constexpr, WARPS: gl.constexpr, N: gl.constexpr, UNITS: gl.constexpr):
    """Values for equal stretches of a step, [W, N, UNITS], as one for each byte."""
    wide = gl.reshape(values.to(gl.bfloat16), [WARPS, N, UNITS, 1]).broadcast_to([WARPS, N, UNITS, STEP // UNITS])
    return gl.convert_layout(gl.reshape(wide, [WARPS, N, STEP]), L, assert_trivial=True)


@gluon.jit
def _scaled(w, scale, lowest, MIN: gl.constexpr):
    if MIN:
        return gl.inline_asm_elementwise(
            SCALE_AND_ADD, "=r,r,r,r", [w, scale, lowest], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(SCALE, "=r,r,r", [w, scale], dtype=gl.bfloat16, is_pure=True, pack=2)


# ---------------------------------------------------------------- the kernel


@gluon.jit
def _await_previous(rows):
    """As launch.await_previous."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [rows], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _few_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, min_ptr, row_ptr, bias_ptr, gain_ptr, add_ptr, y_ptr, rows, outputs, eps,
    INNER: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr, ASSEMBLY: gl.constexpr,
    HOW: gl.constexpr, MIN: gl.constexpr, ROW: gl.constexpr, BIAS: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr,
    GATED: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """HOW: "rows", a scale for each row; "sums", scales of the sums of groups; "values", of what codes mean."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    L: gl.constexpr = _lanes_layout(WARPS, N, 1)
    INPUTS: gl.constexpr = STEP * 2 if TILE else STEP  # of a step
    HALF: gl.constexpr = TILE // 2 if TILE else 1
    SETS: gl.constexpr = 2 if GATED else 1  # gate and up take turns
    TURNS: gl.constexpr = WIDTH // (STEP * WARPS) * SETS
    GROUPS: gl.constexpr = INNER // GROUP
    OWN: gl.constexpr = INPUTS // GROUP if HOW == "values" else 1  # groups of a step
    SIZE: gl.constexpr = STEP // OWN  # bytes of a group in a step
    UNIT: gl.constexpr = SIZE if SIZE < 16 else 16  # of bytes that a scale is read for: a lane has no more
    G: gl.constexpr = _lanes_layout(WARPS, N, UNIT)

    # Codes of the first turns are asked for before the kernel before is waited for: it does not write them.
    first = gl.program_id(0) * N
    w_a, n_a, byte = _place(first, L, WARPS, N, STEP)
    code_at = codes_ptr + gl.minimum(n_a, outputs - 1).to(gl.int64) * WIDTH + w_a * STEP + byte
    up = gl.cast(outputs, gl.int64) * WIDTH  # one output is a constant
    c0 = gl.load(code_at)
    c1 = c0
    c2 = c0
    c3 = c0
    if AHEAD > 1 and TURNS > 1:
        c1 = gl.load(code_at + (up if GATED else WARPS * STEP))
    if AHEAD > 2 and TURNS > 2:
        c2 = gl.load(code_at + (1 if GATED else 2) * (WARPS * STEP))
    if AHEAD > 3 and TURNS > 3:
        c3 = gl.load(code_at + (up if GATED else 0) + (1 if GATED else 3) * (WARPS * STEP))

    # Inputs in the order of the tensor cores, whose place k is byte (k % 32) // 8 * 16 + k // 32 * 8 + k % 8 of a step.
    w_b = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B))), 1), 2)
    k_b = gl.expand_dims(gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, B))), 0), 2)
    m_b = gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, B))), 0), 0)
    own = ((k_b % 32) // 8) * 16 + (k_b // 32) * 8 + k_b % 8
    low = (own // HALF) * TILE + own % HALF if TILE else own
    low = gl.max_contiguous(gl.multiple_of(low, [1, 8, 1]), [1, 8, 1])
    x_at = x_ptr + gl.minimum(m_b, rows - 1) * INNER + w_b * INPUTS + low
    gain_at = gain_ptr + w_b * INPUTS + low + m_b * 0
    w_c = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
    n_c = first + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0)
    n_c = gl.minimum(n_c, outputs - 1)
    w_g, n_g, g = _place(first, G, WARPS, N, STEP // UNIT)
    n_g = gl.minimum(n_g, outputs - 1)
    if PDL:
        _await_previous(rows)

    none = gl.zeros([WARPS, N, COLUMNS], gl.float32, layout=mma)
    acc = none
    acc_up = none
    given = none
    for step in gl.static_range(TURNS // SETS):
        x = gl.load(x_at + step * (WARPS * INPUTS))
        high = gl.load(x_at + HALF + step * (WARPS * INPUTS)) if TILE else x
        if NORM:
            gain = gl.load(gain_at + step * (WARPS * INPUTS))
            x = gl.inline_asm_elementwise(SCALE, "=r,r,r", [x, gain], dtype=gl.bfloat16, is_pure=True, pack=2)
            if TILE:
                gain = gl.load(gain_at + HALF + step * (WARPS * INPUTS))
                high = gl.inline_asm_elementwise(SCALE, "=r,r,r", [high, gain], dtype=gl.bfloat16, is_pure=True, pack=2)
        if MIN and HOW == "sums":  # of the group's inputs, in every row
            ones = gl.full([WARPS, N, STEP], 1.0, gl.bfloat16, layout=A)
            given = mma_v2(ones, x, none)
            if TILE:
                given = mma_v2(ones, high, given)
        for part in gl.static_range(SETS):
            codes = c0
            c0 = c1
            c1 = c2
            c2 = c3
            if step * SETS + part + AHEAD < TURNS:
                later = (step * SETS + part + AHEAD) // SETS * (WARPS * STEP)
                coming = gl.load(code_at + (up if (part + AHEAD) % SETS else 0) + later)
                if AHEAD == 1:
                    c0 = coming
                elif AHEAD == 2:
                    c1 = coming
                elif AHEAD == 3:
                    c2 = coming
                else:
                    c3 = coming
            if TILE:
                w, w_high = gl.inline_asm_elementwise(
                    ASSEMBLY, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
                )
            else:
                w = gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
                w_high = w
            if HOW == "values":
                where = (n_g + part * outputs) * GROUPS + (step * WARPS + w_g) * OWN + g * UNIT // SIZE
                scale = _of_bytes(gl.load(scale_ptr + where), L, WARPS, N, STEP // UNIT)
                lowest = _of_bytes(gl.load(min_ptr + where), L, WARPS, N, STEP // UNIT) if MIN else scale
                w = _scaled(w, scale, lowest, MIN)
                if TILE:
                    w_high = _scaled(w_high, scale, lowest, MIN)
            total = mma_v2(_operand(w, A, WARPS, N), x, none if HOW == "sums" else acc if part == 0 else acc_up)
            if TILE:
                total = mma_v2(_operand(w_high, A, WARPS, N), high, total)
            if HOW == "sums":
                where = (n_c + part * outputs) * GROUPS + ((step * WARPS + w_c) * INPUTS) // GROUP
                total = total * gl.expand_dims(gl.load(scale_ptr + where).to(gl.float32), 2)
                if MIN:
                    total += given * gl.expand_dims(gl.load(min_ptr + where).to(gl.float32), 2)
                total += acc if part == 0 else acc_up
            if part == 0:
                acc = total
            else:
                acc_up = total

    out: gl.constexpr = gl.SliceLayout(0, mma)
    n = gl.expand_dims(first + gl.arange(0, N, layout=gl.SliceLayout(1, out)), 1)
    m = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, out)), 0)
    inside = n < outputs
    y = gl.sum(acc, 0)
    other = gl.sum(acc_up, 0) if GATED else y
    if HOW == "rows":
        y = y * gl.load(scale_ptr + n, mask=inside, other=0.0).to(gl.float32)
        if GATED:
            other = other * gl.load(scale_ptr + outputs + n, mask=inside, other=0.0).to(gl.float32)
    if ROW:
        y = y * gl.load(row_ptr + n, mask=inside, other=0.0).to(gl.float32)
        if GATED:
            other = other * gl.load(row_ptr + outputs + n, mask=inside, other=0.0).to(gl.float32)
    if NORM:
        V: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
        BLOCK: gl.constexpr = 256 * WARPS
        k = gl.arange(0, BLOCK, layout=V)
        squares = gl.zeros([BLOCK], gl.float32, layout=V)
        for j in gl.static_range((INNER + BLOCK - 1) // BLOCK):
            v = gl.load(x_ptr + j * BLOCK + k, mask=j * BLOCK + k < INNER, other=0.0).to(gl.float32)
            squares += v * v
        size = gl.rsqrt(gl.sum(squares, 0) / INNER + eps)
        y = y * size
        other = other * size
    if BIAS:
        y += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
        if GATED:
            other += gl.load(bias_ptr + outputs + n, mask=inside, other=0.0).to(gl.float32)
    if GATED:
        y = y / (1.0 + gl.exp(-y)) * other
    there = inside & (m < rows)
    if ADD:
        y += gl.load(add_ptr + m * outputs + n, mask=there, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * outputs + n, y.to(y_ptr.dtype.element_ty), mask=there)


# ---------------------------------------------------------------- launching


def _way(matrix: Any) -> str:
    """How the scales of a matrix are applied; "": not by this kernel."""
    coding, single = matrix.coding, matrix.scale.shape[1] == 1
    inputs = 2 * STEP.value if coding.tile else STEP.value
    if single and matrix.minimum is None:
        return "rows"
    if coding.group % inputs == 0:
        return "sums"
    return "values" if inputs % coding.group == 0 and coding.group % max(1, coding.tile) == 0 else ""


def takes(x: torch.Tensor, matrix: Any) -> bool:
    """Whether `few_rows` can take this product on its device."""
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= MOST_ROWS and is_fit(matrix)


def is_fit(matrix: Any) -> bool:
    coding, width = matrix.coding, matrix.codes.shape[1]
    if width % STEP.value or not assembly(coding.kind, coding.offset) or not _way(matrix):
        return False
    packed = coding.kind in ("u4", "e2m1")
    return packed == bool(coding.tile) and width // STEP.value // _warps(matrix, False) <= _MOST_STEPS


def _warps(matrix: Any, gated: bool) -> int:
    """More of them share a row where there are few rows, or many bytes of each."""
    outputs, width = matrix.codes.shape
    programs = cdiv(outputs, ROWS)
    few = programs <= (2 if matrix.coding.tile else 3) * _PROCESSORS
    warps = 8 if few and not gated else 4
    while width % (STEP.value * warps):
        warps //= 2
    return warps


def few_rows(
    x: torch.Tensor,  # [rows, inputs], contiguous, bfloat16
    matrix: Any,  # Coded
    bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor | None = None,  # for one row: it goes through an RMS norm first
    eps: float = 0.0,
    add: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """See linear.gemv."""
    count, inner = matrix.shape
    outputs, rows, coding = count // 2 if gated else count, x.shape[0], matrix.coding
    assert gain is None or rows == 1, "the norm is that of one row"
    warps = _warps(matrix, gated)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    scale = matrix.scale
    _few_rows_kernel[(cdiv(outputs, ROWS),)](
        x, matrix.codes, scale, scale if matrix.minimum is None else matrix.minimum,
        scale if matrix.row is None else matrix.row, x if bias is None else bias, x if gain is None else gain,
        x if add is None else add, y, rows, outputs, eps,
        INNER=inner, GROUP=coding.group, WIDTH=matrix.codes.shape[1], TILE=coding.tile,
        ASSEMBLY=assembly(coding.kind, coding.offset), HOW=_way(matrix), MIN=matrix.minimum is not None,
        ROW=matrix.row is not None, BIAS=bias is not None, NORM=gain is not None, ADD=add is not None, GATED=gated,
        N=ROWS, COLUMNS=MOST_ROWS, WARPS=warps, AHEAD=4 if warps <= 4 else 2, num_warps=warps, **early(x),
    )  # fmt: skip
    return y
