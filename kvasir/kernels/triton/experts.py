"""A layer's experts: the choice of experts, the order of rows, and two products, each in one launch.

A pair is a token and one of its experts, numbered token * top_k + place. In small steps nearly every pair has an expert
to itself, so each is multiplied by itself, at the speed at which matrices are read. In larger ones pairs are sorted by
expert and each expert's matrices meet its rows in tiles; how many rows an expert has is read on the device, so that
nothing waits and launches can sit in a CUDA graph: there are as many programs as tiles there can be at most. The second
product multiplies by the router's weights and leaves one part for each place; those are summed in float32 in the
router's order, by the norm that follows or by a launch of their own, so that no sum depends on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2
from kvasir.kernels.triton.linear import load_columns
from kvasir.kernels.triton.pointwise import activate

# ---------------------------------------------------------------- the choice


@triton.jit
def _route_kernel(
    logits_ptr, correction_ptr, weight_ptr, chosen_ptr, scale,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    there = e < EXPERTS
    await_previous(PDL)
    x = tl.load(logits_ptr + token * EXPERTS + e, mask=there, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + e, mask=there, other=0.0)
    choice = tl.where(there, choice, -float("inf"))
    if GROUPS > TOP_GROUPS:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = e // SIZE
        quality = tl.full([PADDED], -float("inf"), tl.float32)  # of each expert's group
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, choice, -float("inf"))
            best = tl.max(own, 0)
            if BY_TWO:
                first = tl.min(tl.where(own == best, e, PADDED), 0)
                best += tl.max(tl.where(e == first, -float("inf"), own), 0)
            quality = tl.where(group == g, best, quality)
        quality = tl.where(there, quality, -float("inf"))
        kept = e < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(kept, -float("inf"), quality), 0)
            winner = tl.min(tl.where((quality == best) & (kept == 0) & there, group, PADDED), 0)
            kept = kept | (group == winner)
        choice = tl.where(kept, choice, -float("inf"))
    place = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    taken = e >= EXPERTS
    for k in tl.static_range(TOP_K):
        left = tl.where(taken, -float("inf"), choice)
        best = tl.max(left, 0)
        # the first of those that are equally good; of numbers that are not numbers, the first that is left
        expert = tl.min(tl.where((left == best) & (taken == 0), e, PADDED), 0)
        expert = tl.where(expert == PADDED, tl.min(tl.where(taken, PADDED, e), 0), expert)
        weights = tl.where(place == k, tl.sum(tl.where(e == expert, score, 0.0), 0), weights)
        chosen = tl.where(place == k, expert, chosen)
        taken = taken | (e == expert)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1.0e-20)
    tl.store(weight_ptr + token * TOP_K + place, weights * scale, mask=place < TOP_K)
    tl.store(chosen_ptr + token * TOP_K + place, chosen, mask=place < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    correction: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    by_two: bool = False,
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.route. The numbers are int32."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits.contiguous(), correction, weights, chosen, scale,
        EXPERTS=experts, PADDED=next_power_of_2(experts), TOP_K=top_k, SLOTS=next_power_of_2(top_k),
        SIGMOID=scoring == "sigmoid", GROUPS=groups, TOP_GROUPS=top_groups, BY_TWO=by_two, NORMALISE=normalise,
        num_warps=1 if experts <= 128 else 4, **early(logits),
    )  # fmt: skip
    return weights, chosen


# ---------------------------------------------------------------- the order of rows


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    chosen_ptr, order_ptr, starts_ptr, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program for each expert: it counts the pairs of the experts before it, then lists its own in their order."""
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    await_previous(PDL)
    less = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        number = tl.load(chosen_ptr + first + i, mask=first + i < pairs, other=EXPERTS)
        less += (number < expert).to(tl.int32)
    at = tl.sum(less, 0)
    tl.store(starts_ptr + expert, at)
    for first in range(0, pairs, BLOCK):
        number = tl.load(chosen_ptr + first + i, mask=first + i < pairs, other=EXPERTS)
        own = (number == expert).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(own, 0) - 1, first + i, mask=own > 0)
        at += tl.sum(own, 0)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, at)


def sort_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs by expert, [pairs] int32, and where each expert's begin, and the end, [experts + 1] int32."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    block = 1024 if pairs <= 1024 else 4096
    _sort_kernel[(experts,)](
        chosen, order, starts, pairs, EXPERTS=experts, BLOCK=block, num_warps=4 if block <= 1024 else 8,
        **early(chosen),
    )  # fmt: skip
    return order, starts


# ---------------------------------------------------------------- products of rows that are sorted


@triton.jit
def _find_rows(starts_ptr, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, EXPERTS if there is none, and the tile's rows: the first, and the end of the expert's."""
    g = tl.arange(0, PADDED)
    begin = tl.load(starts_ptr + g, mask=g < EXPERTS, other=0)
    end = tl.load(starts_ptr + g + 1, mask=g < EXPERTS, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & (g < EXPERTS)).to(tl.int32), 0)
    here = g == expert
    row = tl.sum(tl.where(here, begin + (tile - (ends - tiles)) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def apply_gate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """See reference.gated_activation, in float32."""
    if KIND == "clamped":
        gate = tl.minimum(gate, LIMIT)
        y = (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        y = activate(gate, KIND) * up
    return y


@triton.jit(do_not_specialize_on_alignment=["order_ptr", "starts_ptr"])
def _gate_up_kernel(
    x_ptr, matrix_ptr, matrices, bias_ptr, order_ptr, starts_ptr, y_ptr, INPUTS, INNER,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    expert, first, end = _find_rows(starts_ptr, tl.program_id(1), EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, BLOCK_M)
    token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + token.to(tl.int64)[:, None] * INPUTS
    top = matrix_ptr + expert.to(tl.int64) * 2 * INNER * INPUTS + n.to(tl.int64)[:, None] * INPUTS
    line = expert * 2 * INNER + tl.program_id(0) * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, INPUTS, BLOCK_K):
        inside = (at + k) < INPUTS
        x = tl.load(x_row + (at + k)[None, :], mask=(row < end)[:, None] & inside[None, :], other=0.0)
        if DESCRIPTOR:
            g = matrices.load([line, at])
            u = matrices.load([line + INNER, at])
        else:
            mask = (n < INNER)[:, None] & inside[None, :]
            g = tl.load(top + (at + k)[None, :], mask=mask, other=0.0)
            u = tl.load(top + INNER * INPUTS + (at + k)[None, :], mask=mask, other=0.0)
        gate = tl.dot(x, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(u), up, input_precision="ieee")
    if bias_ptr is not None:
        bias = bias_ptr + expert * 2 * INNER + n
        gate += tl.load(bias, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + INNER, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    y = apply_gate(gate, up, KIND, ALPHA, LIMIT)
    mask = (row < end)[:, None] & (n < INNER)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * INNER + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["order_ptr", "starts_ptr", "weight_ptr"])
def _down_kernel(
    x_ptr, rows, matrix_ptr, matrices, bias_ptr, order_ptr, starts_ptr, weight_ptr, y_ptr, tokens, INNER, OUTPUTS,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DESCRIPTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    expert, first, end = _find_rows(starts_ptr, tl.program_id(1), EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, BLOCK_M)
    pair = tl.load(order_ptr + row, mask=row < end, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + row.to(tl.int64)[:, None] * INNER
    matrix = matrix_ptr + expert.to(tl.int64) * OUTPUTS * INNER + n.to(tl.int64)[:, None] * INNER
    line = expert * OUTPUTS + tl.program_id(0) * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, INNER, BLOCK_K):
        if DESCRIPTOR:  # rows of the next expert are multiplied, too, and not stored
            x = rows.load([first, at])
            w = matrices.load([line, at])
        else:
            inside = (at + k) < INNER
            x = tl.load(x_row + (at + k)[None, :], mask=(row < end)[:, None] & inside[None, :], other=0.0)
            w = tl.load(matrix + (at + k)[None, :], mask=(n < OUTPUTS)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    acc = acc * tl.load(weight_ptr + pair, mask=row < end, other=0.0)[:, None]
    part = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    mask = (row < end)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(y_ptr + part[:, None] * OUTPUTS + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- products of single rows
#
# x is loaded once for each of a program's rows of the matrix: a tensor of one dimension would go through shared memory
# at every step, and no load could begin before the barrier ahead of it.

REGISTERS = 128  # of a thread, so that four programs of four warps share a multiprocessor


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])
def _pair_gate_up_kernel(
    x_ptr, matrix_ptr, bias_ptr, chosen_ptr, y_ptr,
    INPUTS: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    pair = tl.program_id(1)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    if expert >= EXPERTS:  # another rank has it
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], [BLOCK_N, BLOCK_K])
    top = matrix_ptr + (expert * 2 * INNER + tl.where(n < INNER, n, 0))[:, None] * INPUTS
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for at in tl.static_range(0, INPUTS, BLOCK_K):
        x = load_columns(x_ptr + pair // TOP_K * INPUTS + at + k, k, INPUTS - at, BLOCK_K)
        gate += load_columns(top + at + k, k, INPUTS - at, BLOCK_K) * x
        up += load_columns(top + INNER * INPUTS + at + k, k, INPUTS - at, BLOCK_K) * x
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if bias_ptr is not None:
        bias = bias_ptr + expert * 2 * INNER + n
        gate_sum += tl.load(bias, mask=n < INNER, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    y = apply_gate(gate_sum, up_sum, KIND, ALPHA, LIMIT)
    tl.store(y_ptr + pair * INNER + n, y.to(y_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["chosen_ptr", "weight_ptr"])
def _pair_down_kernel(
    x_ptr, matrix_ptr, bias_ptr, chosen_ptr, weight_ptr, y_ptr, tokens,
    INNER: tl.constexpr, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    pair = tl.program_id(1)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    if expert >= EXPERTS:  # its part is zero
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], [BLOCK_N, BLOCK_K])
    matrix = matrix_ptr + (expert * OUTPUTS + tl.where(n < OUTPUTS, n, 0))[:, None] * INNER
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for at in tl.static_range(0, INNER, BLOCK_K):
        x = load_columns(x_ptr + pair * INNER + at + k, k, INNER - at, BLOCK_K)
        acc += load_columns(matrix + at + k, k, INNER - at, BLOCK_K) * x
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)
    y = y * tl.load(weight_ptr + pair)
    part = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    tl.store(y_ptr + part * OUTPUTS + n, y.to(y_ptr.dtype.element_ty), mask=n < OUTPUTS)


# ---------------------------------------------------------------- the sum


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    part_ptr, y_ptr, tokens, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + (part * tokens + token) * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * WIDTH + i, total.to(y_ptr.dtype.element_ty), mask=i < WIDTH)


def _sum_parts(parts: torch.Tensor) -> torch.Tensor:
    count, tokens, width = parts.shape
    y = torch.empty(tokens, width, dtype=parts.dtype, device=parts.device)
    block = min(1024, next_power_of_2(width))
    _sum_kernel[(tokens, cdiv(width, block))](
        parts, y, tokens, WIDTH=width, PARTS=count, BLOCK=block, num_warps=4, **early(parts)
    )
    return y


# ---------------------------------------------------------------- all together


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Sizes of a tile, and how it is computed."""

    rows: int
    gate_columns: int  # of the gate, and as many of up
    down_columns: int
    depth: int
    warps: int
    stages: int


def choose_expert_tile(pairs: int, experts: int) -> ExpertTile:
    """By the rows that an expert gets on average; estimated from what others measured on an H200, not measured."""
    each = pairs / experts
    if each <= 8:
        return ExpertTile(16, 32, 64, 128, 4, 4)
    if each <= 24:
        return ExpertTile(32, 64, 64, 128, 4, 3)
    if each <= 48:
        return ExpertTile(64, 64, 128, 64, 4, 4)
    return ExpertTile(128, 128, 256, 64, 8, 3)


def each_pair_alone(pairs: int, experts: int) -> bool:
    """Whether most pairs have an expert to themselves, so that sorting them would save nothing."""
    return pairs * 4 <= experts or pairs <= 8


def columns_of_a_step(width: int) -> int:
    """For products of single rows; each of four warps loads 256 of a row at once."""
    return 256 if width <= 256 or (width % 512 and width % 256 == 0) else 512


def activation_options(activation: str | tuple[float, float]) -> dict[str, Any]:
    """For `apply_gate`."""
    alpha, limit = (0.0, 0.0) if isinstance(activation, str) else activation
    return dict(KIND=activation if isinstance(activation, str) else "clamped", ALPHA=alpha, LIMIT=limit)


def _descriptors(matrix: torch.Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = matrix.view(-1, matrix.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), [flat.shape[1], 1], [rows, depth])


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str | tuple[float, float],
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    leave_parts: bool = False,
    is_apart: bool = False,
) -> torch.Tensor:
    """See reference.experts. With `leave_parts`, [top_k, tokens, hidden] that must still be summed."""
    (tokens, top_k), (count, hidden, inner) = chosen.shape, down.shape
    pairs, x = tokens * top_k, x.contiguous()
    kind = activation_options(activation)
    middle = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    make = torch.zeros if is_apart else torch.empty  # parts of pairs that other ranks have stay zero
    parts = make(top_k, tokens, hidden, dtype=x.dtype, device=x.device)
    if each_pair_alone(pairs, count):
        shape, pdl = dict(BLOCK_N=4, TOP_K=top_k, EXPERTS=count, num_warps=4, maxnreg=REGISTERS), early(x)
        _pair_gate_up_kernel[(cdiv(inner, 4), pairs)](
            x, gate_up, gate_up_bias, chosen, middle,
            INPUTS=hidden, INNER=inner, BLOCK_K=columns_of_a_step(hidden), **shape, **kind, **pdl,
        )  # fmt: skip
        _pair_down_kernel[(cdiv(hidden, 4), pairs)](
            middle, down, down_bias, chosen, weights, parts, tokens,
            INNER=inner, OUTPUTS=hidden, BLOCK_K=columns_of_a_step(inner), **shape, **pdl,
        )  # fmt: skip
    else:
        order, starts = sort_pairs(chosen, count)
        tile = choose_expert_tile(pairs, count)
        most = min(pairs, cdiv(pairs, tile.rows) + count)  # every expert may have one tile that is not full
        whole = x.is_cuda and x.element_size() == 2 and inner % tile.gate_columns == hidden % tile.depth == 0
        gate_descriptor = whole and tile.rows >= 64
        down_descriptor = whole and tile.rows >= 64 and hidden % tile.down_columns == inner % tile.depth == 0
        shape = dict(
            TOP_K=top_k, EXPERTS=count, PADDED=next_power_of_2(count), BLOCK_M=tile.rows, BLOCK_K=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _gate_up_kernel[(cdiv(inner, tile.gate_columns), most)](
            x, gate_up, _descriptors(gate_up, tile.gate_columns, tile.depth) if gate_descriptor else gate_up,
            gate_up_bias, order, starts, middle, hidden, inner,
            BLOCK_N=tile.gate_columns, DESCRIPTOR=gate_descriptor, **shape, **kind, **early(x),
        )  # fmt: skip
        _down_kernel[(cdiv(hidden, tile.down_columns), most)](
            middle, _descriptors(middle, tile.rows, tile.depth) if down_descriptor else middle,
            down, _descriptors(down, tile.down_columns, tile.depth) if down_descriptor else down,
            down_bias, order, starts, weights, parts, tokens, inner, hidden,
            BLOCK_N=tile.down_columns, DESCRIPTOR=down_descriptor, **shape, **early(x),
        )  # fmt: skip
    return parts if leave_parts else _sum_parts(parts)
