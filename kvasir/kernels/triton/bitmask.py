"""Tokens that a line may not take, from one bit for each: reads the bits, writes only what is forbidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early

_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _mask_logits_kernel(
    logits_ptr, stride, row_ptr, slot_ptr, allowed_ptr,
    VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tl.load(row_ptr + line)).to(tl.int64)
    if slot < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(allowed_ptr + slot * WORDS + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + line * stride + token, float("-inf"), mask=inside & forbidden)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, allowed: torch.Tensor) -> None:
    """See reference.mask_logits."""
    lines, vocab = logits.shape
    _mask_logits_kernel[(lines, triton.cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), rows, slots, allowed,
        VOCAB=vocab, WORDS=allowed.shape[1], BLOCK=_BLOCK, num_warps=4, **early(logits),
    )  # fmt: skip
