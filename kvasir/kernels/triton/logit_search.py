"""What logit_floor.py knows of each line's search, and how one round narrows it.

Every program of a line works this out for itself from what the launch before left: the same numbers added in the same
order, so that all agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A line's search after a round, 8 float32: the highest logit, how much is wanted (negative: a share of what is over
# `low`), the bounds low <= edge < high, what is over `high`, how many logits lie between, and the state: one of the two
# below, or 1 + round * MARKS + mark when those between can be listed (the counts of that round tell where).
RECORD: tl.constexpr = tl.constexpr(8)
SEARCHING: tl.constexpr = tl.constexpr(0.0)
SETTLED: tl.constexpr = tl.constexpr(-1.0)  # the edge is `low`


@triton.jit
def terms_of(line, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab):
    """A line's 1 / temperature in units of log2(e) (0: it keeps everything), min-p, top-k and top-p."""
    row = tl.load(row_ptr + line)
    heat = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    filters = (heat > 0.0) & ((min_p > 0.0) | (top_k > 0) | (top_p < 1.0))
    scale = tl.where(filters, 1.4426950408889634 / tl.where(heat > 0.0, heat, 1.0), 0.0)
    return scale, min_p, top_k, top_p


@triton.jit
def load_record(record_ptr, at):
    record = record_ptr + at * RECORD
    top = tl.load(record)
    wanted = tl.load(record + 1)
    low = tl.load(record + 2)
    high = tl.load(record + 3)
    over = tl.load(record + 4)
    between = tl.load(record + 5)
    state = tl.load(record + 6)
    return top, wanted, low, high, over, between, state


@triton.jit
def store_record(record_ptr, at, top, wanted, low, high, over, between, state):
    record = record_ptr + at * RECORD
    tl.store(record, top)
    tl.store(record + 1, wanted)
    tl.store(record + 2, low)
    tl.store(record + 3, high)
    tl.store(record + 4, over)
    tl.store(record + 5, between)
    tl.store(record + 6, state)


@triton.jit
def open_search(stats_ptr, line, scale, min_p, top_k, top_p, vocab, chunks, CHUNKS: tl.constexpr):
    """A search before its first round: top, wanted, low, state."""
    c = tl.arange(0, CHUNKS)
    stats = stats_ptr + (line * chunks + c) * 3
    tops = tl.load(stats, mask=c < chunks, other=-float("inf"))
    top = tl.maximum(tl.max(tops, 0), -1.0e30)
    bottom = tl.min(tl.load(stats + 1, mask=c < chunks, other=float("inf")), 0)
    sums = tl.load(stats + 2, mask=c < chunks, other=0.0)
    total = tl.sum(tl.where(tops == -float("inf"), 0.0, sums * tl.exp2((tops - top) * scale)), 0)
    low = tl.maximum(bottom, top - 200.0 / scale)  # further down a weight is 0
    wanted = top_k.to(tl.float32)
    if top_k == 0:
        wanted = tl.where(min_p > 0.0, -top_p, top_p * total)
        # all that is lighter than this is less than the rest that top-p leaves out
        low = tl.maximum(low, top + tl.log2((1.0 - top_p) * 0.5 * total / vocab) / scale)
    if min_p > 0.0:
        low = tl.maximum(bottom, top + tl.log2(min_p) / scale)
    searching = (top_k > 0) | (top_p < 1.0)
    return top, wanted, tl.minimum(low, top), tl.where(searching, SEARCHING, SETTLED)


@triton.jit
def narrow(
    record_ptr, mark_ptr, count_ptr, mass_ptr, line, round, lines, chunks, top_k, top_p,
    CHUNKS: tl.constexpr, MARKS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """A search after `round`: its record. The pointers are those of the first round."""
    at = round * lines + line
    top, wanted, low, high, over, between, state = load_record(record_ptr, at)
    if state == SEARCHING:
        c = tl.arange(0, CHUNKS)[:, None]
        j = tl.arange(0, MARKS)
        marks = tl.load(mark_ptr + at * MARKS + j)
        cell = (at * chunks + c) * MARKS + j[None, :]
        counts = tl.sum(tl.load(count_ptr + cell, mask=c < chunks, other=0), 0).to(tl.float32)
        masses = tl.sum(tl.load(mass_ptr + cell, mask=c < chunks, other=0.0), 0)
        wanted = tl.where(wanted < 0.0, -wanted * tl.sum(tl.where(j == 0, masses, 0.0), 0), wanted)
        amounts = tl.where(top_k > 0, counts, masses)
        edge = tl.maximum(tl.sum((amounts >= wanted).to(tl.int32), 0) - 1, 0)
        above = tl.minimum(edge + 1, MARKS - 1)
        low = tl.sum(tl.where(j == edge, marks, 0.0), 0)
        high = tl.sum(tl.where(j == above, marks, 0.0), 0)
        over = tl.sum(tl.where(j == above, amounts, 0.0), 0)
        kept = tl.sum(tl.where(j == edge, counts, 0.0), 0)
        between = kept - tl.sum(tl.where(j == above, counts, 0.0), 0)
        # everything over `low`, or what is between; not so if top-p comes after top-k and must see everything
        listed = (between <= LIST) & ((top_k == 0) | (top_p >= 1.0))
        if kept <= LIST:
            listed = kept <= LIST
            high = tl.full([], float("inf"), tl.float32)
            over = tl.full([], 0.0, tl.float32)
            between = kept
        state = tl.where(listed, 1.0 + (round * MARKS + edge).to(tl.float32), SEARCHING)
        state = tl.where(edge == MARKS - 1, SETTLED, state)  # the highest logit alone is enough
    return top, wanted, low, high, over, between, state
