"""A layer's experts for one row, with the norm before them and the residual after them, in two launches.

The experts that a router chose, and one that every row goes to, are places: the shared one is cut into pieces that are
as wide as an expert. The first launch has programs for each place. In the second a program takes some outputs of all
places, so that it adds them up, and the residual, before it rounds. The row is loaded as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.experts import REGISTERS, activation_options, apply_gate, columns_of_a_step
from kvasir.kernels.triton.launch import await_previous, cdiv, early
from kvasir.kernels.triton.linear import load_columns

ROWS = 4  # of the matrices in a program


@triton.jit
def _one_row_gate_up_kernel(
    x_ptr, gain_ptr, matrix_ptr, bias_ptr, shared_ptr, chosen_ptr, y_ptr, eps,
    INPUTS: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], [BLOCK_N, BLOCK_K])
    within = tl.where(n < INNER, n, 0)[:, None].to(tl.int64) * INPUTS + k
    await_previous(PDL)
    expert = tl.load(chosen_ptr + tl.minimum(place, TOP_K - 1)).to(tl.int64)
    top = matrix_ptr + expert * (2 * INNER * INPUTS)
    up_top = top + INNER * INPUTS
    if PIECES > 0 and place >= TOP_K:
        top = shared_ptr + (place - TOP_K).to(tl.int64) * (INNER * INPUTS)
        up_top = top + PIECES * INNER * INPUTS
    rows = top + within
    up_rows = up_top + within
    gate_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for at in tl.static_range(0, INPUTS, BLOCK_K):
        x = load_columns(x_ptr + at + k, k, INPUTS - at, BLOCK_K)
        squares += x * x
        x = x * load_columns(gain_ptr + at + k, k, INPUTS - at, BLOCK_K)
        gate_acc += load_columns(rows + at, k, INPUTS - at, BLOCK_K) * x
        up_acc += load_columns(up_rows + at, k, INPUTS - at, BLOCK_K) * x
    scale = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)
    gate_sum = tl.sum(gate_acc, 1) * scale
    up_sum = tl.sum(up_acc, 1) * scale
    if bias_ptr is not None:  # the shared expert has none
        mask = (n < INNER) & (place < TOP_K)
        bias = bias_ptr + expert * 2 * INNER + n
        gate_sum += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + INNER, mask=mask, other=0.0).to(tl.float32)
    y = apply_gate(gate_sum, up_sum, KIND, ALPHA, LIMIT)
    tl.store(y_ptr + place * INNER + n, y.to(y_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit
def _one_row_down_kernel(
    x_ptr, matrix_ptr, bias_ptr, shared_ptr, chosen_ptr, weight_ptr, add_ptr, y_ptr,
    INNER: tl.constexpr, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], [BLOCK_N, BLOCK_K])
    inside = n < OUTPUTS
    line = tl.where(inside, n, 0).to(tl.int64)
    await_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    y = tl.load(add_ptr + n, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K + PIECES):
        if place < TOP_K:
            expert = tl.load(chosen_ptr + place).to(tl.int64)
            weight = tl.load(weight_ptr + place)
            rows = matrix_ptr + (expert * OUTPUTS + line)[:, None] * INNER + k
            if bias_ptr is not None:
                y += tl.load(bias_ptr + expert * OUTPUTS + n, mask=inside, other=0.0).to(tl.float32) * weight
        else:
            weight = 1.0
            rows = shared_ptr + line[:, None] * (PIECES * INNER) + (place - TOP_K) * INNER + k
        for at in tl.static_range(0, INNER, BLOCK_K):
            x = load_columns(x_ptr + place * INNER + at + k, k, INNER - at, BLOCK_K) * weight
            acc += load_columns(rows + at, k, INNER - at, BLOCK_K) * x
    y += tl.sum(acc, 1)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=inside)


def one_row_experts(
    x: torch.Tensor,  # [1, hidden]
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str | tuple[float, float],
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor,
    eps: float,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """See reference.fused_experts. The shared expert is a multiple of the others."""
    (_, top_k), (_, hidden, inner) = chosen.shape, down.shape
    shared_gate_up, shared_down = (gate_up, down) if shared is None else shared
    pieces = 0 if shared is None else shared_down.shape[1] // inner
    middle = torch.empty(top_k + pieces, inner, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    shape = dict(INNER=inner, TOP_K=top_k, PIECES=pieces, BLOCK_N=ROWS, num_warps=4, maxnreg=REGISTERS, **early(x))
    _one_row_gate_up_kernel[(cdiv(inner, ROWS), top_k + pieces)](
        x, gain, gate_up, gate_up_bias, shared_gate_up, chosen, middle, eps,
        INPUTS=hidden, BLOCK_K=columns_of_a_step(hidden), **activation_options(activation), **shape,
    )  # fmt: skip
    _one_row_down_kernel[(cdiv(hidden, ROWS),)](
        middle,
        down,
        down_bias,
        shared_down,
        chosen,
        weights,
        x,
        y,
        OUTPUTS=hidden,
        BLOCK_K=columns_of_a_step(inner),
        **shape,
    )
    return y
