"""Rules about single tokens, from lists by slot: bias, and words that must not be completed. Programs of lines that do
not ask end at once. Lists grow with what callers ask for, so that their lengths are no part of what is compiled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.reference import ANY_TOKEN
from kvasir.kernels.triton.overlap import await_previous, early

_BLOCK = 128  # entries of a list


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
    _add_bias_kernel[(len(logits), triton.cdiv(width, _BLOCK))](
        logits, logits.stride(0), rows, slots, ids, values, width, BLOCK=_BLOCK, num_warps=1, **early(logits)
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
    _ban_words_kernel[(len(logits), triton.cdiv(words, _BLOCK))](
        logits, logits.stride(0), rows, slots, beginnings, ends, recent, words, length,
        ANY=ANY_TOKEN, BLOCK=_BLOCK, num_warps=1, **early(logits),
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
        tokens, rows, slots, recent, recent.shape[1], BLOCK=_BLOCK, num_warps=1, **early(tokens)
    )
