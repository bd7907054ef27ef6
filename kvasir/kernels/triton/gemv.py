"""One row times a matrix, where reading the matrix is the whole cost: 4.0 to 4.5 TB/s on an H200 for large ones.

A few rows of the matrix per program, the inner dimension unrolled, so that many 16-byte loads are in flight. What
stands before and after a product in a layer is done on the way: for one row a launch costs more than its work. While
the kernel before it ends, a program already has the first columns of its rows brought to the cache that all processors
share; more than those few take the bandwidth from that kernel (256 columns: a layer of 8B in 113.4 us on an H200; none:
114.1; 1024: 119.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton import tuned
from kvasir.kernels.triton.overlap import await_previous, early

AHEAD = 256  # columns of its rows of the matrix that a program asks for before it waits for x


@triton.jit
def _fetch(lines):
    """Ask for cache lines of 128 bytes, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, gain_ptr, add_ptr, y_ptr, outputs, eps,
    INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < outputs
    rows = w_ptr + tl.where(inside, n, 0)[:, None].to(tl.int64) * INNER + k[None, :]
    if PDL:
        lines = w_ptr + tl.where(inside, n, 0)[:, None].to(tl.int64) * INNER + 64 * tl.arange(0, AHEAD // 64)[None, :]
        _fetch(lines)
        if GATED:
            _fetch(lines + outputs.to(tl.int64) * INNER)
    await_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(INNER // BLOCK_K):
        x = tl.load(x_ptr + i * BLOCK_K + k).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(gain_ptr + i * BLOCK_K + k).to(tl.float32)
        acc += tl.load(rows + i * BLOCK_K).to(tl.float32) * x[None, :]
        if GATED:
            acc_up += tl.load(rows + outputs.to(tl.int64) * INNER + i * BLOCK_K).to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    up = tl.sum(acc_up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / INNER + eps)
        y = y * scale
        up = up * scale
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + outputs + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y += tl.load(add_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=inside)


UNTUNED = [2, 1024, 2]  # rows of the matrix per program, columns per step, warps


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gemv` is for this product: one row, of a size that its blocks divide."""
    return len(x) == 1 and is_fit(weight)


def is_fit(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.shape[1] % 512 == 0 and weight.is_contiguous()


def gemv(
    x: torch.Tensor,  # [1, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs]
    bias: torch.Tensor | None = None,  # [outputs]
    *,
    gain: torch.Tensor | None = None,  # [inputs]: x goes through an RMS norm first
    eps: float = 0.0,
    add: torch.Tensor | None = None,  # [1, outputs]: added to the result
    gated: bool = False,  # half of the outputs: silu of the first half times the second
    blocks: list[int] | None = None,  # None: as measured
) -> torch.Tensor:
    """See reference.fused_linear."""
    rows, inner = weight.shape
    outputs = rows // 2 if gated else rows
    kind = "gated" if gated else "norm" if gain is not None else "add" if add is not None else "plain"
    block_n, block_k, warps = blocks or tuned.find(tuned.gemv_key(kind, rows, inner), x) or UNTUNED
    while inner % block_k:
        block_k //= 2
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outputs, block_n),)](
        x, weight, weight if bias is None else bias, weight if gain is None else gain, weight if add is None else add,
        y, outputs, eps, INNER=inner, BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, NORM=gain is not None,
        ADD=add is not None, GATED=gated, AHEAD=min(AHEAD, inner & -inner), num_warps=warps, **early(x),
    )  # fmt: skip
    return y
