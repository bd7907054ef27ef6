"""Tokens that a line may not take, from one bit for each: reads the bits, writes only what is forbidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _mask_logits_kernel(
    logits_ptr, stride, lines_ptr, allowed_ptr, slots_ptr, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    line = tl.load(lines_ptr + i).to(tl.int64)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(allowed_ptr + slot * WORDS + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + line * stride + token, float("-inf"), mask=inside & forbidden)


def mask_logits(logits: torch.Tensor, lines: torch.Tensor, allowed: torch.Tensor, slots: torch.Tensor) -> None:
    """See reference.mask_logits."""
    vocab = logits.shape[1]
    grid = (len(lines), triton.cdiv(vocab, _BLOCK))
    _mask_logits_kernel[grid](
        logits, logits.stride(0), lines, allowed, slots, VOCAB=vocab, WORDS=allowed.shape[1], BLOCK=_BLOCK, num_warps=4
    )
