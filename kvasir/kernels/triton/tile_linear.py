"""A few rows times a matrix on the tensor cores, for shapes at which this reads the matrix faster than cuBLAS does.

The matrix is on the side of a tensor-core tile that must have 64 rows, x on the short one, so that 2 rows do not pay
for 64. Which shapes, and with what blocks, is measured: see tuned.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton import tuned

COUNTS = (16, 32, 64)  # rows of x that a tile is made for


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, w_desc, bias_ptr, y_ptr, count, outputs,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        if DESCRIPTOR:
            w = w_desc.load([first, at])
        else:
            w = tl.load(
                w_ptr + n[:, None].to(tl.int64) * INNER + at + k[None, :], mask=(n < outputs)[:, None], other=0.0
            )
        x = tl.load(x_ptr + m[:, None] * INNER + at + k[None, :], mask=(m < count)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    y = y_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=(m < count)[:, None] & (n < outputs)[None, :])


def blocks_for(x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    """The blocks to use for this product, if it is one that was measured to gain."""
    if not 1 < len(x) <= COUNTS[-1] or weight.dim() != 2 or x.element_size() != 2 or not weight.is_contiguous():
        return None
    count = next(count for count in COUNTS if len(x) <= count)
    outputs, inner = weight.shape
    return tuned.find(tuned.tile_key(outputs, inner, count), x)


def tile_linear(
    x: torch.Tensor,  # [rows, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs], contiguous
    bias: torch.Tensor | None,  # [outputs]
    blocks: list[int],  # outputs and inputs per tile, warps, stages
) -> torch.Tensor:
    """See reference.linear."""
    outputs, inner = weight.shape
    block_n, block_k, warps, stages = blocks
    block_m = max(16, triton.next_power_of_2(len(x)))
    y = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    described = weight
    if x.is_cuda:
        from triton.tools.tensor_descriptor import TensorDescriptor

        described = TensorDescriptor(weight, [outputs, inner], [inner, 1], [block_n, block_k])
    _tile_kernel[(triton.cdiv(outputs, block_n),)](
        x, weight, described, weight if bias is None else bias, y, len(x), outputs,
        INNER=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, DESCRIPTOR=x.is_cuda,
        STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
