"""One row times a matrix, where reading the matrix is the whole cost: 4.0 to 4.5 TB/s on an H200 for large ones.

A few rows of the matrix per program, the inner dimension unrolled, so that many 16-byte loads are in flight. What
stands before and after a product in a layer is done on the way: for one row a launch costs more than its work. While
the kernel before it ends, a program already has the first columns of its rows brought to the cache that all processors
share; more than those few take the bandwidth from that kernel (256 columns: a layer of 8B in 113.4 us on an H200; none:
114.1; 1024: 119.2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2

AHEAD = 256  # columns of the matrix that a program prefetches before it waits for x


@triton.jit
def _fetch(lines):
    """Prefetch cache lines of 128 bytes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_columns(pointers, k, LEFT: tl.constexpr, BLOCK_K: tl.constexpr):
    """In float32; zeros past the LEFT columns that there still are. Whole blocks are loaded without a mask."""
    y = tl.load(pointers) if LEFT >= BLOCK_K else tl.load(pointers, mask=k < LEFT, other=0.0)
    return y.to(tl.float32)


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
    for i in tl.static_range((INNER + BLOCK_K - 1) // BLOCK_K):
        x = load_columns(x_ptr + i * BLOCK_K + k, k, INNER - i * BLOCK_K, BLOCK_K)
        if NORM:
            squares += x * x
            x = x * load_columns(gain_ptr + i * BLOCK_K + k, k, INNER - i * BLOCK_K, BLOCK_K)
        acc += load_columns(rows + i * BLOCK_K, k[None, :], INNER - i * BLOCK_K, BLOCK_K) * x[None, :]
        if GATED:
            up_rows = rows + outputs.to(tl.int64) * INNER + i * BLOCK_K
            acc_up += load_columns(up_rows, k[None, :], INNER - i * BLOCK_K, BLOCK_K) * x[None, :]
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
    """Whether `gemv` can take this product: one row, and a matrix whose rows begin at cache lines."""
    return x.shape[0] == 1 and is_fit(weight)


def is_fit(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.shape[1] % 64 == 0 and weight.is_contiguous()


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
    block_n, block_k, warps = blocks or find(gemv_key(kind, rows, inner), x) or UNTUNED
    while inner % block_k and block_k > 512:
        block_k //= 2
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _gemv_kernel[(cdiv(outputs, block_n),)](
        x, weight, weight if bias is None else bias, weight if gain is None else gain, weight if add is None else add,
        y, outputs, eps, INNER=inner, BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, NORM=gain is not None,
        ADD=add is not None, GATED=gated, AHEAD=min(AHEAD, inner & -inner), num_warps=warps, **early(x),
    )  # fmt: skip
    return y


# ----------------------------------------------------------------
# A few rows times a matrix on the tensor cores, for shapes at which this reads the matrix faster than cuBLAS does.
#
# The matrix is on the side of a tensor-core tile that must have 64 rows and x on the short side, so that 2 rows do not
# cost as much as 64. Narrow matrices give too few tiles to fill the GPU, so their inner dimension is split, and the
# next norm adds up the parts. Shapes and blocks are measured: see below.

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
    """The blocks for this product, if it was measured to be faster with them."""
    return _find(tile_key, x, weight)


def parts_for(x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    """The same for products whose parts the next kernel may add up; the last number is the number of parts."""
    return _find(parts_key, x, weight)


def _find(key: Callable[[int, int, int], str], x: torch.Tensor, weight: torch.Tensor) -> list[int] | None:
    rows = x.shape[0]
    if not 1 < rows <= COUNTS[-1] or weight.dim() != 2 or x.element_size() != 2 or not weight.is_contiguous():
        return None
    return _measured(key, *weight.shape, rows, x.device.index)


@cache
def _measured(
    key: Callable[[int, int, int], str], outputs: int, inner: int, rows: int, device: int | None
) -> list[int] | None:
    return table(device_name(device)).get(key(outputs, inner, next(count for count in COUNTS if rows <= count)))


def tile_linear(
    x: torch.Tensor,  # [rows, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs], contiguous
    bias: torch.Tensor | None,  # [outputs]
    blocks: list[int],  # outputs and inputs per tile, warps, stages
) -> torch.Tensor:
    """See reference.linear."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, [*blocks, 1])
    return y


def linear_parts(
    x: torch.Tensor,  # [rows, inputs], contiguous
    weight: torch.Tensor,  # [outputs, inputs], contiguous
    blocks: list[int],  # outputs and inputs per tile, warps, stages, parts
) -> torch.Tensor:
    """[parts, rows, outputs] float32, whose sum is the product."""
    y = torch.empty(blocks[-1], x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, blocks)
    return y


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, blocks: list[int]
) -> None:
    outputs, inner = weight.shape
    block_n, block_k, warps, stages, split = blocks
    rows = x.shape[0]
    block_m = min(128, max(16, next_power_of_2(rows)))
    described = weight
    if x.is_cuda:
        from triton.tools.tensor_descriptor import TensorDescriptor

        described = TensorDescriptor(weight, [outputs, inner], [inner, 1], [block_n, block_k])
    _tile_kernel[(cdiv(outputs, block_n), split, cdiv(rows, block_m))](
        x, weight, described, weight if bias is None else bias, y, rows, outputs,
        INNER=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=split, BIAS=bias is not None,
        DESCRIPTOR=x.is_cuda, STAGES=stages, num_warps=warps, num_stages=stages, **early(x),
    )  # fmt: skip


# ----------------------------------------------------------------
# Which blocks a small product runs with, by device, kind, shape and rows: data, in products.json.
#
# benchmarks/h200/tune_products.py measures them anew, for another GPU or another model's shapes. A device or a shape
# that was never measured gets safe blocks, and cuBLAS in place of tiles.

DATA = Path(__file__).parent / "products.json"


@cache
def table(device_name: str) -> dict[str, list[int]]:
    """The measured entries of a device: "kind rows x inner [x at most so many rows of x]" -> blocks."""
    measured: dict[str, dict[str, list[int]]] = json.loads(DATA.read_text(encoding="utf-8"))
    return measured.get(device_name, {})


@cache
def device_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index) if torch.cuda.is_available() else "none"


def find(key: str, x: torch.Tensor) -> list[int] | None:
    return table(device_name(x.device.index)).get(key)


def gemv_key(kind: str, rows: int, inner: int) -> str:
    return f"gemv {kind} {rows}x{inner}"


def tile_key(rows: int, inner: int, count: int) -> str:
    return f"tile {rows}x{inner} for {count}"


def parts_key(rows: int, inner: int, count: int) -> str:
    return f"parts {rows}x{inner} for {count}"
