"""A few rows times a matrix on the tensor cores, for shapes at which this reads the matrix faster than cuBLAS does.

The matrix is on the side of a tensor-core tile that must have 64 rows, x on the short one, so that 2 rows do not pay
for 64. Narrow matrices give too few tiles to fill the GPU, so their inner dimension is split, and the sums of the parts
are left to the norm that comes next. Which shapes, and with what blocks, is measured: see tuned.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton import tuned
from kvasir.kernels.triton.overlap import await_previous, early

COUNTS = (16, 32, 64, 128, 256)  # rows of x that are measured


@triton.jit(do_not_specialize=["count"])
def _tile_kernel(
    x_ptr, w_ptr, w_desc, bias_ptr, y_ptr, count, outputs,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, DESCRIPTOR: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    first = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(part * (INNER // SPLIT), (part + 1) * (INNER // SPLIT), BLOCK_K, num_stages=STAGES):
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
    y = y_ptr + (part * count + m)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=(m < count)[:, None] & (n < outputs)[None, :])


def blocks_for(x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    """The blocks to use for this product, if it is one that was measured to gain."""
    return _find(tuned.tile_key, x, weight)


def parts_for(x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    """The same where the sums of parts may be left to the next kernel; the last number is how many parts."""
    return _find(tuned.parts_key, x, weight)


def _find(key: Callable[[int, int, int], str], x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    if not 1 < len(x) <= COUNTS[-1] or weight.dim() != 2 or x.element_size() != 2 or not weight.is_contiguous():
        return None
    outputs, inner = weight.shape
    return tuned.find(key(outputs, inner, next(count for count in COUNTS if len(x) <= count)), x)


def tile_linear(
    x: torch.Tensor,  # [rows, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs], contiguous
    bias: torch.Tensor | None,  # [outputs]
    blocks: list[int],  # outputs and inputs per tile, warps, stages
) -> torch.Tensor:
    """See reference.linear."""
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, [*blocks, 1])
    return y


def linear_parts(
    x: torch.Tensor,  # [rows, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs], contiguous
    blocks: list[int],  # outputs and inputs per tile, warps, stages, parts
) -> torch.Tensor:
    """[parts, rows, outputs] float32, whose sum is the product."""
    y = torch.empty(blocks[-1], len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, blocks)
    return y


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, blocks: list[int]
) -> None:
    outputs, inner = weight.shape
    block_n, block_k, warps, stages, split = blocks
    block_m = min(128, max(16, triton.next_power_of_2(len(x))))
    described = weight
    if x.is_cuda:
        from triton.tools.tensor_descriptor import TensorDescriptor

        described = TensorDescriptor(weight, [outputs, inner], [inner, 1], [block_n, block_k])
    _tile_kernel[(triton.cdiv(outputs, block_n), split, triton.cdiv(len(x), block_m))](
        x, weight, described, weight if bias is None else bias, y, len(x), outputs,
        INNER=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=split, BIAS=bias is not None,
        DESCRIPTOR=x.is_cuda, STAGES=stages, num_warps=warps, num_stages=stages, **early(x),
    )  # fmt: skip
