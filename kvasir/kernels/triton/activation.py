"""silu(gate) * up in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    # rounded in between, as the reference is
    active = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + i, (active * up).to(y_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * n], contiguous: silu of the left half, times the right half."""
    tokens, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(tokens, triton.cdiv(width, block))](x, y, WIDTH=width, BLOCK=block, num_warps=4, **early(x))
    return y
