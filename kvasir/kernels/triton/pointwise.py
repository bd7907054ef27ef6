"""Norms of each row, alone or after adding the residual, and gated activations: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, y_ptr, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    gain = tl.load(gain_ptr + i, mask=inside, other=0.0)
    await_previous(PDL)
    x = tl.load(x_ptr + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * rows + row) * WIDTH + i, mask=inside, other=0.0)
    if ADD:
        # the sum is rounded before it is normalised, because the next layer adds to the rounded sum
        x = (x + tl.load(residual_ptr + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + row * WIDTH + i, x, mask=inside)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x.to(gain_ptr.dtype.element_ty).to(tl.float32) * gain.to(tl.float32)
    tl.store(y_ptr + row * WIDTH + i, y.to(y_ptr.dtype.element_ty), mask=inside)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    y = torch.empty_like(x if residual is None else residual)
    rows, block = y.numel() // width, next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, y, rows, eps,
        WIDTH=width, BLOCK=block, ADD=residual is not None, PARTS=x.numel() // y.numel(),
        num_warps=min(8, max(1, block // 512)), **early(y),
    )  # fmt: skip
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm. x must be contiguous."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm. The sum takes residual's memory."""
    return _launch(x, residual, weight, eps), residual


# ----------------------------------------------------------------
# LayerNorm.


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, bias_ptr, y_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    gain = tl.load(gain_ptr + i, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    x = tl.load(x_ptr + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # the sum is rounded before it is normalised, as the reference's is
        x = (x + tl.load(residual_ptr + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        if KEEP:
            tl.store(residual_ptr + row * WIDTH + i, x, mask=inside)
        x = x.to(tl.float32)
    # A GPU's usual division is not exact: equal numbers would differ from their mean, and the norm would show it.
    x = tl.where(inside, x - tl.div_rn(tl.sum(x, 0), WIDTH * 1.0), 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * gain + bias
    tl.store(y_ptr + row * WIDTH + i, y.to(y_ptr.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    keep_sum: bool = False,
) -> torch.Tensor:
    """See reference.layer_norm. The residual must be contiguous. With `keep_sum` the sum takes its memory."""
    x = x.contiguous()
    width, y = x.shape[-1], torch.empty_like(x)
    rows, block = x.numel() // width, next_power_of_2(width)
    if not rows:
        return y
    _layer_norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, weight if bias is None else bias, y, eps,
        WIDTH=width, BLOCK=block, ADD=residual is not None, KEEP=keep_sum, HAS_BIAS=bias is not None,
        num_warps=min(8, max(1, block // 512)), **early(y),
    )  # fmt: skip
    return y


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_layer_norm. The sum takes residual's memory."""
    return layer_norm(x, weight, bias, eps, residual, keep_sum=True), residual


# ----------------------------------------------------------------
# activation(gate) * up in one launch.


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu", "not an activation of kernels/reference.py")
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def _gated_kernel(
    x_ptr, y_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == "clamped":
        gate = tl.minimum(gate, LIMIT)
        y = (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        y = activate(gate, KIND).to(y_ptr.dtype.element_ty).to(tl.float32) * up  # rounded, as the reference is
    tl.store(y_ptr + row * WIDTH + i, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_activation(x: torch.Tensor, kind: str | tuple[float, float]) -> torch.Tensor:
    """See reference.gated_activation. x must be contiguous."""
    alpha, limit = (0.0, 0.0) if isinstance(kind, str) else kind
    kind = kind if isinstance(kind, str) else "clamped"
    tokens, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_2(width))
    grid = (tokens, cdiv(width, block))
    _gated_kernel[grid](x, y, WIDTH=width, BLOCK=block, KIND=kind, ALPHA=alpha, LIMIT=limit, num_warps=4, **early(x))
    return y
