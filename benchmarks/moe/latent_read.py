"""Loads the tiles of a latent cache as hopper_latent does, and computes nothing: what attention cannot beat."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvasir.kernels.triton.hopper_latent import KEYS, LATENT, ROTARY, STAGES, _barriers, _find_range, _load

HEADS = gl.constexpr(16)


@gluon.jit
def _wait(length_ptr, seq, first, left, q_here, q_free, k_here, k_free):
    step = 0
    turn = 0
    while left > 0:
        length = gl.load(length_ptr + seq)
        tiles = gl.minimum((length + KEYS - 1) // KEYS - first, left)
        if tiles > 0:
            mbarrier.wait(q_here.index(turn % 2), (turn // 2) & 1)
            mbarrier.arrive(q_free.index(turn % 2))
            turn += 1
        for _ in range(tiles):
            mbarrier.wait(k_here.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(k_free.index(step % STAGES))
            step += 1
        left -= tiles
        first = 0
        seq += 1


@gluon.jit
def _read_kernel(
    queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, sequences, ranges, table_stride,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    q = gl.allocate_shared_memory(vectors.dtype, [2, 1, HEADS, LATENT], queries.layout)
    q_turned = gl.allocate_shared_memory(vectors.dtype, [2, 1, HEADS, ROTARY], rotated.layout)
    k = gl.allocate_shared_memory(vectors.dtype, [STAGES, KEYS, LATENT], vectors.layout)
    k_turned = gl.allocate_shared_memory(vectors.dtype, [STAGES, KEYS, ROTARY], turned.layout)
    q_here, q_free, k_here, k_free = _barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    seq, first, left = _find_range(length_ptr, sequences, ranges, 2, gl.program_id(1))
    gl.warp_specialize([
        (_wait, (length_ptr, seq, first, left, q_here, q_free, k_here, k_free)),
        (_load, (queries, rotated, vectors, turned, table_ptr, row_ptr, length_ptr, table_stride, seq, first, left,
                 (q, q_turned, q_here, q_free), (k, k_turned, k_here, k_free), HEADS, BLOCK_SIZE, 2, False)),
    ], [4], [40])  # fmt: skip


def read_tiles(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kv_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    pages, block_size, width = kv_cache.shape
    flat, deep = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 3)
    copies = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, HEADS.value, x.shape[2]], deep)
        for x in (query, rotated)
    ]
    copies += [
        TensorDescriptor(kv_cache, [pages * block_size, width], [width, 1], [KEYS.value, columns], flat)
        for columns in (LATENT.value, ROTARY.value)
    ]
    ranges = torch.cuda.get_device_properties(query.device).multi_processor_count
    _read_kernel[(1, ranges)](
        *copies, tables, rows, lengths, len(lengths), ranges, tables.stride(0), BLOCK_SIZE=block_size, num_warps=4
    )
