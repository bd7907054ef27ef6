"""Products of many matrices, each with its own rows of one batch, in one launch: the experts of a layer.

How many rows a group has is read on the device, so that nothing waits and the launch can sit in a CUDA graph: there are
as many programs as tiles there can be at most, and each finds its group by counting the tiles before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _grouped_linear_kernel(
    x_ptr, weight_ptr, starts_ptr, tiles_ptr, y_ptr, INPUTS, OUTPUTS,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    g = tl.arange(0, PADDED)
    # tiles_ptr[g] is how many tiles groups 0 to g have together
    before = tl.load(tiles_ptr + g, mask=g < GROUPS, other=2147483647)
    group = tl.sum((before <= tile).to(tl.int32), 0)
    if group >= GROUPS:
        return
    first_tile = tl.max(tl.where(g < group, before, 0), 0)
    start = tl.load(starts_ptr + group)
    end = tl.load(starts_ptr + group + 1)
    row = (start + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight_ptr + group.to(tl.int64) * OUTPUTS * INPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, INPUTS, BLOCK_K):
        inside = (at + k) < INPUTS
        x = tl.load(
            x_ptr + row[:, None] * INPUTS + (at + k)[None, :], mask=(row < end)[:, None] & inside[None, :], other=0.0
        )
        w = tl.load(
            matrix + n[:, None] * INPUTS + (at + k)[None, :], mask=(n < OUTPUTS)[:, None] & inside[None, :], other=0.0
        )
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    mask = (row < end)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(y_ptr + row[:, None] * OUTPUTS + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """See reference.grouped_linear. x and weight must be contiguous."""
    (groups, outputs, inputs), rows = weight.shape, len(x)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    per_group = rows // groups  # if rows are spread evenly
    block_m = 16 if per_group <= 16 else 64 if per_group <= 128 else 128
    block_n = 64 if block_m == 16 else 128
    counts = starts[1:] - starts[:-1]
    tiles = torch.cumsum((counts + (block_m - 1)) // block_m, 0, dtype=torch.int32)
    # every group may have one tile that is not full
    most = min(rows, triton.cdiv(rows, block_m) + groups)
    _grouped_linear_kernel[(triton.cdiv(outputs, block_n), most)](
        x, weight, starts, tiles, y, inputs, outputs,
        GROUPS=groups, PADDED=triton.next_power_of_2(groups), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64,
        num_warps=4 if block_m < 128 else 8, num_stages=3,
    )  # fmt: skip
    return y
