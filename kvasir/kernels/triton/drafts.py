"""Drafts from a row's own text, and their verification, one program per row. The lookup reads the text once, in blocks,
and compares further back only where the last token occurs. See kernels/reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, early, next_power_of_2

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "length_ptr"])
def _lookup_kernel(
    history_ptr, stride, row_ptr, length_ptr, draft_ptr, count_ptr, shortest, longest,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, LATEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
    size = tl.load(length_ptr + tl.program_id(0))
    text = history_ptr + row * stride
    last = tl.load(text + tl.maximum(size, 1) - 1)
    best = tl.full((), -1, tl.int64)  # length of the match in the high half, its place in the low half
    for begin in range(0, size - 1, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        alive = (place < size - 1) & (tl.load(text + place, mask=place < size - 1, other=-1) == last)
        matched = alive.to(tl.int32)
        most = tl.where(tl.max(matched, 0) > 0, longest, 1)  # a block without the last token is done
        for back in range(1, most):
            wanted = tl.load(text + tl.maximum(size - 1 - back, 0))
            inside = alive & (place >= back)
            alive = inside & (tl.load(text + place - back, mask=inside, other=-1) == wanted)
            matched += alive.to(tl.int32)
        rank = place if LATEST else 0x7FFFFFFF - place
        score = (matched.to(tl.int64) << 32) + rank
        best = tl.maximum(best, tl.max(tl.where(matched >= shortest, score, -1), 0))
    found = best >= 0
    rank = (best & 0x7FFFFFFF).to(tl.int32)
    start = tl.where(found, (rank if LATEST else 0x7FFFFFFF - rank) + 1, 0)
    period = tl.maximum(size - start, 1)
    column = tl.arange(0, COLUMNS)
    token = tl.load(text + start + column % period, mask=column < SIZE, other=0)
    tl.store(draft_ptr + row * SIZE + column, token, mask=column < SIZE)
    most = SIZE if LATEST else tl.minimum(period, SIZE)
    tl.store(count_ptr + row, tl.where(found, most, 0))


def lookup_drafts(
    history: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    shortest: int,
    longest: int,
    latest: bool,
) -> None:
    """See reference.lookup_drafts."""
    size = drafts.shape[1]
    _lookup_kernel[(len(rows),)](
        history, history.stride(0), rows, lengths, drafts, counts, shortest, longest,
        SIZE=size, COLUMNS=next_power_of_2(size), LATEST=latest, BLOCK=_BLOCK, num_warps=4, num_stages=1,
        **early(history),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "row_ptr", "start_ptr", "line_ptr", "own_ptr", "taken_ptr"])
def _accept_kernel(
    token_ptr, row_ptr, start_ptr, line_ptr, draft_ptr, count_ptr, computed_ptr, next_ptr, own_ptr, taken_ptr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + i).to(tl.int64)
    last = tl.load(line_ptr + i) - 1
    column = tl.arange(0, COLUMNS)
    token = tl.load(token_ptr + tl.load(start_ptr + i) + tl.minimum(column, last))
    verified = tl.minimum(last, tl.load(count_ptr + row))
    draft = tl.load(draft_ptr + row * SIZE + column, mask=column < SIZE, other=-1)
    wrong = (column >= verified) | (token != draft)
    right = tl.min(tl.where(wrong, column, COLUMNS), 0)
    tl.store(own_ptr + i * (SIZE + 1) + column, token, mask=column <= SIZE)
    tl.store(taken_ptr + i, right + 1)
    tl.store(next_ptr + row, tl.maximum(tl.sum(tl.where(column == right, token, 0), 0), 0))
    tl.store(computed_ptr + row, tl.load(computed_ptr + row) - (last - right))


def accept_drafts(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lines: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    num_computed: torch.Tensor,
    next_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.accept_drafts."""
    size = drafts.shape[1]
    own = torch.empty(len(rows), 1 + size, dtype=torch.int32, device=tokens.device)
    taken = torch.empty(len(rows), dtype=torch.int32, device=tokens.device)
    _accept_kernel[(len(rows),)](
        tokens, rows, starts, lines, drafts, counts, num_computed, next_token, own, taken,
        SIZE=size, COLUMNS=next_power_of_2(size + 1), num_warps=1, **early(tokens),
    )  # fmt: skip
    return own, taken
