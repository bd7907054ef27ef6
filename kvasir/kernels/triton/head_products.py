"""Each head's own matrix times the head's vectors: what absorbs a latent cache's matrices into queries and results.

For a few tokens a program has loaded its part of a matrix before the launch ahead of it is done. A part is small enough
to be held in registers, and the matrices of all heads are read once for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2

FEW = 4  # tokens; of more, the matrices are read once for all
SIZE = 4096  # numbers of a matrix in a program


@triton.jit
def _head_product_kernel(
    x_ptr, w_ptr, y_ptr, x_token_stride, x_head_stride, w_head_stride, w_output_stride, w_input_stride,
    HEADS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    at = w_ptr + head * w_head_stride + n[:, None] * w_output_stride + k[None, :] * w_input_stride
    w = tl.load(at, mask=(n < OUTPUTS)[:, None] & (k < INPUTS)[None, :], other=0.0)
    await_previous(PDL)
    x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + k, mask=k < INPUTS, other=0.0)
    y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(y_ptr + (token * HEADS + head) * OUTPUTS + n, y.to(y_ptr.dtype.element_ty), mask=n < OUTPUTS)


def multiply_heads(
    x: torch.Tensor,  # [tokens, heads, inputs], any strides but the last
    weight: torch.Tensor,  # [heads, outputs, inputs], any strides
    out: torch.Tensor,  # [tokens, heads, outputs], contiguous
) -> None:
    tokens, heads, outputs = out.shape
    if tokens > FEW:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return
    block_k = next_power_of_2(x.shape[2])
    block_n = max(1, SIZE // block_k)
    _head_product_kernel[(cdiv(outputs, block_n), heads, tokens)](
        x, weight, out, x.stride(0), x.stride(1), *weight.stride(),
        HEADS=heads, OUTPUTS=outputs, INPUTS=x.shape[2], BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, **early(x),
    )  # fmt: skip
