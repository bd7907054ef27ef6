"""Penalties for tokens that were there before, from counts by slot. Programs of lines that do not ask end at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.overlap import await_previous, early

_BLOCK = 2048
_LINES = 256


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _penalize_kernel(
    logits_ptr, stride, row_ptr, slot_ptr, count_ptr, prompt_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tl.load(row_ptr + line)).to(tl.int64)
    if slot < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    x = tl.load(logits_ptr + line * stride + token, mask=inside, other=0.0)
    count = tl.load(count_ptr + slot * VOCAB + token, mask=inside, other=0)
    generated = count > 0
    seen = generated | (tl.load(prompt_ptr + slot * VOCAB + token, mask=inside, other=0) != 0)
    factor = tl.where(seen, tl.load(repetition_ptr + slot), 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    again = tl.load(frequency_ptr + slot) * count.to(tl.float32)
    x -= again + tl.where(generated, tl.load(presence_ptr + slot), 0.0)
    tl.store(logits_ptr + line * stride + token, x, mask=inside)


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """See reference.penalize."""
    lines, vocab = logits.shape
    _penalize_kernel[(lines, triton.cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), rows, slots, counts, in_prompt.view(torch.uint8), presence, frequency, repetition,
        VOCAB=vocab, BLOCK=_BLOCK, num_warps=4, **early(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["lines"], do_not_specialize_on_alignment=["row_ptr"])
def _count_tokens_kernel(
    token_ptr, row_ptr, slot_ptr, count_ptr, lines, VOCAB: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < lines
    row = tl.load(row_ptr + line, mask=inside, other=0)
    slot = tl.load(slot_ptr + row, mask=inside, other=-1).to(tl.int64)
    asks = slot >= 0
    token = tl.load(token_ptr + line, mask=asks, other=0)
    tl.atomic_add(count_ptr + slot * VOCAB + token, 1, mask=asks, sem="relaxed")


def count_tokens(tokens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor) -> None:
    """See reference.count_tokens."""
    lines = len(tokens)
    _count_tokens_kernel[(triton.cdiv(lines, _LINES),)](
        tokens, rows, slots, counts, lines, VOCAB=counts.shape[1], LINES=_LINES, num_warps=1, **early(tokens)
    )
