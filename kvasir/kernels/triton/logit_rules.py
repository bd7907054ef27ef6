"""Penalties for tokens that were there before, from counts by slot. Programs of lines that do not ask end at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.reference import ANY_TOKEN
from kvasir.kernels.triton.launch import await_previous, cdiv, early

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
    _penalize_kernel[(lines, cdiv(vocab, _BLOCK))](
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
    _count_tokens_kernel[(cdiv(lines, _LINES),)](
        tokens, rows, slots, counts, lines, VOCAB=counts.shape[1], LINES=_LINES, num_warps=1, **early(tokens)
    )


# ----------------------------------------------------------------
# Rules about single tokens, from lists by slot: bias, and words that must not be completed. Programs of lines that do
# not ask end at once. Lists grow with what callers ask for, so that their lengths are no part of what is compiled.

_LIST_BLOCK = 128  # entries of a list


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["row_ptr"])
def _add_bias_kernel(
    logits_ptr, stride, row_ptr, slot_ptr, id_ptr, value_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tl.load(row_ptr + line)).to(tl.int64)
    if slot < 0:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + slot * width + i, mask=i < width, other=0.0)
    token = tl.load(id_ptr + slot * width + i, mask=i < width, other=0)
    # the token that lists are padded with may also be one of theirs
    tl.atomic_add(logits_ptr + line * stride + token, value, mask=value != 0, sem="relaxed")


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> None:
    """See reference.add_bias."""
    width = ids.shape[1]
    _add_bias_kernel[(len(logits), cdiv(width, _LIST_BLOCK))](
        logits, logits.stride(0), rows, slots, ids, values, width, BLOCK=_LIST_BLOCK, num_warps=1, **early(logits)
    )


@triton.jit(do_not_specialize=["words", "length"], do_not_specialize_on_alignment=["row_ptr"])
def _ban_words_kernel(
    logits_ptr, stride, row_ptr, slot_ptr, beginning_ptr, end_ptr, recent_ptr, words, length,
    ANY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + tl.load(row_ptr + line)).to(tl.int64)
    if slot < 0:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begun = word < words
    at = beginning_ptr + (slot * words + word) * length
    for i in range(length):
        known = tl.load(at + i, mask=begun, other=0)
        begun &= (known == ANY) | (known == tl.load(recent_ptr + slot * length + i))
    token = tl.load(end_ptr + slot * words + word, mask=begun, other=0)
    tl.store(logits_ptr + line * stride + token, float("-inf"), mask=begun)


def ban_words(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    beginnings: torch.Tensor,
    ends: torch.Tensor,
    recent: torch.Tensor,
) -> None:
    """See reference.ban_words."""
    words, length = beginnings.shape[1:]
    _ban_words_kernel[(len(logits), cdiv(words, _LIST_BLOCK))](
        logits, logits.stride(0), rows, slots, beginnings, ends, recent, words, length,
        ANY=ANY_TOKEN, BLOCK=_LIST_BLOCK, num_warps=1, **early(logits),
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["row_ptr"])
def _push_tokens_kernel(token_ptr, row_ptr, slot_ptr, recent_ptr, length, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    line = tl.program_id(0)
    slot = tl.load(slot_ptr + tl.load(row_ptr + line)).to(tl.int64)
    if slot < 0:
        return
    own = recent_ptr + slot * length
    for first in range(0, length, BLOCK):  # from the left: what a block writes, none after it reads
        i = first + tl.arange(0, BLOCK)
        moved = tl.load(own + i + 1, mask=i + 1 < length, other=0)
        pushed = tl.where(i + 1 == length, tl.load(token_ptr + line), moved)
        tl.debug_barrier()  # its neighbours have read before any of them writes
        tl.store(own + i, pushed, mask=i < length)


def push_tokens(tokens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, recent: torch.Tensor) -> None:
    """See reference.push_tokens."""
    _push_tokens_kernel[(len(tokens),)](
        tokens, rows, slots, recent, recent.shape[1], BLOCK=_LIST_BLOCK, num_warps=1, **early(tokens)
    )


# ----------------------------------------------------------------
# Tokens that a line may not take, from one bit for each: reads the bits, writes only what is forbidden.


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "slot_ptr", "allowed_ptr"])
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
    _mask_logits_kernel[(lines, cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), rows, slots, allowed,
        VOCAB=vocab, WORDS=allowed.shape[1], BLOCK=_BLOCK, num_warps=4, **early(logits),
    )  # fmt: skip
