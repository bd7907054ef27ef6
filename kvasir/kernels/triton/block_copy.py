"""Copies KV blocks, all layers of all of them in one launch: within a pool, or between a pool and a staging buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 1024  # words that one program copies
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_blocks_kernel(
    source_ptr,
    target_ptr,
    source_index_ptr,
    target_index_ptr,
    source_index_stride,
    target_index_stride,
    source_layer,
    source_block,
    target_layer,
    target_block,
    words,
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    taken = tl.load(source_index_ptr + pair * source_index_stride).to(tl.int64)
    given = tl.load(target_index_ptr + pair * target_index_stride).to(tl.int64)
    page = tl.load(source_ptr + layer * source_layer + taken * source_block + word, mask=inside, other=0)
    tl.store(target_ptr + layer * target_layer + given * target_block + word, page, mask=inside)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_index: torch.Tensor, target_index: torch.Tensor
) -> None:
    """See reference.copy_blocks. Pages are contiguous bytes; layers and blocks may lie in any order."""
    layers, _, page_bytes = source.shape
    word = next(kind for kind in WORDS if page_bytes % kind.itemsize == 0)
    source, target = source.view(word), target.view(word)
    words = source.shape[2]
    grid = len(source_index), layers, triton.cdiv(words, CHUNK)
    _copy_blocks_kernel[grid](
        source,
        target,
        source_index,
        target_index,
        source_index.stride(0),
        target_index.stride(0),
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        words,
        CHUNK=CHUNK,
        num_warps=4,
    )
