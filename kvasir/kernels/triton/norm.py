"""RMS norm of each row, alone or after adding the residual, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early


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
        # the sum is rounded before it is normalised: it is what the next layer adds to
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
    rows, block = y.numel() // width, triton.next_power_of_2(width)
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
