"""Min-p, top-k and top-p without a sort: the lowest logit that each line keeps.

It searches for the largest mark above which enough lies: top_k logits, or top_p of the mass. The search is parallel
over the vocabulary, in launches that do not depend on data, so that a CUDA graph can hold them:

1. weigh: each chunk's highest and lowest logit and sum of weights. They bound the search.
2. survey, ROUNDS times: MARKS marks between the bounds; each chunk counts and weighs the logits above each mark. The
   next launch adds these up and continues between two neighbouring marks. Chunks below all marks are not read.
3. fill: once few enough logits lie between the marks (in most lines after the first round), they go into a list, in the
   order of the vocabulary.
4. finish: one program per line bisects its list. A line with thousands of equal logits at the edge has no list; it is
   bisected over the whole vocabulary, which is slower and as exact.

All programs of a line add the same numbers in the same order: a line's result depends on that line alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import cdiv, next_power_of_2

LIST = 4096  # candidates that a line may have
CHUNK = 4096  # logits per program
MARKS = 8
ROUNDS = 3  # 15 times finer each: thousands of logits are listed after two of them, if not many are equal
STEPS = 40  # of a bisection; a float has 24 bits


@triton.jit
def _weigh_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, stats_ptr, vocab, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    scale, _min_p, _top_k, _top_p = terms_of(line, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab)
    if scale == 0.0:
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + line * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    never = x == -float("inf")
    top = tl.max(x, 0)
    weights = tl.where(never, 0.0, tl.exp2((x - tl.maximum(top, -1.0e30)) * scale))
    stats = stats_ptr + (line * chunks + chunk) * 3
    tl.store(stats, top)
    tl.store(stats + 1, tl.min(tl.where(never, float("inf"), x), 0))
    tl.store(stats + 2, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["round", "lines"])  # one version for all of them
def _survey_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, stats_ptr, record_ptr, mark_ptr, count_ptr,
    mass_ptr, round, vocab, lines, chunks,
    FIRST: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MARKS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    scale, min_p, top_k, top_p = terms_of(line, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab)
    at = round * lines + line
    if scale == 0.0:
        if chunk == 0:
            store_record(record_ptr, at, 0.0, 0.0, -float("inf"), 0.0, 0.0, 0.0, SETTLED)
        return
    if FIRST:
        top, wanted, low, state = open_search(stats_ptr, line, scale, min_p, top_k, top_p, vocab, chunks, CHUNKS)
        high = top
        over = 0.0
        between = 0.0
    else:
        top, wanted, low, high, over, between, state = narrow(
            record_ptr, mark_ptr, count_ptr, mass_ptr, line, round - 1, lines, chunks, top_k, top_p,
            CHUNKS, MARKS, LIST,
        )  # fmt: skip
    if chunk == 0:
        store_record(record_ptr, at, top, wanted, low, high, over, between, state)
    if state != SEARCHING:
        return
    cell = (at * chunks + chunk) * MARKS
    if (chunk > 0) & (tl.load(stats_ptr + (line * chunks + chunk) * 3) < low):
        j = tl.arange(0, MARKS)
        tl.store(count_ptr + cell + j, tl.zeros([MARKS], tl.int32))
        tl.store(mass_ptr + cell + j, tl.zeros([MARKS], tl.float32))
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + line * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    weights = tl.exp2((x - top) * scale)
    for j in tl.static_range(MARKS):
        mark = high if j == MARKS - 1 else tl.minimum(low + (high - low) * (j / (MARKS - 1)), high)
        kept = x >= mark
        tl.store(count_ptr + cell + j, tl.sum(kept.to(tl.int32), 0))
        tl.store(mass_ptr + cell + j, tl.sum(tl.where(kept, weights, 0.0), 0))
        if chunk == 0:
            tl.store(mark_ptr + at * MARKS + j, mark)


@triton.jit(do_not_specialize=["lines"])
def _fill_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, record_ptr, mark_ptr, count_ptr, mass_ptr,
    list_ptr, rounds, vocab, lines, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MARKS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    _scale, _min_p, top_k, top_p = terms_of(line, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab)
    top, wanted, low, high, over, between, state = narrow(
        record_ptr, mark_ptr, count_ptr, mass_ptr, line, rounds - 1, lines, chunks, top_k, top_p, CHUNKS, MARKS, LIST
    )
    if chunk == 0:
        store_record(record_ptr, rounds * lines + line, top, wanted, low, high, over, between, state)
    if state <= 0.0:
        return
    c = tl.arange(0, CHUNKS)
    place = state.to(tl.int32) - 1
    cell = count_ptr + ((place // MARKS * lines + line) * chunks + c) * MARKS + place % MARKS
    counts = tl.load(cell, mask=c < chunks, other=0)
    if high < float("inf"):
        counts -= tl.load(cell + 1, mask=c < chunks, other=0)
    if tl.sum(tl.where(c == chunk, counts, 0), 0) == 0:
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + line * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    kept = ((x >= low) & (x < high)).to(tl.int32)
    at = tl.sum(tl.where(c < chunk, counts, 0), 0) + tl.cumsum(kept, 0) - 1
    tl.store(list_ptr + line * LIST + at, x, mask=(kept == 1) & (at < LIST))


@triton.jit
def _bisect(x, amounts, over, wanted, low, high, STEPS: tl.constexpr):
    """The largest mark above which as much lies as is wanted, computed from the list."""
    for _ in range(STEPS):
        middle = low + (high - low) * 0.5
        enough = over + tl.sum(tl.where(x >= middle, amounts, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _amount(logits_ptr, vocab, mark, top, scale, counts: tl.constexpr, BLOCK: tl.constexpr):
    """The number of logits of a whole line that are at least `mark`, or the sum of their weights."""
    amount = 0.0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
        each = 1.0 if counts else tl.exp2((x - top) * scale)
        amount += tl.sum(tl.where((x >= mark) & (i < vocab), each, 0.0), 0)
    return amount


@triton.jit
def _bisect_all(logits_ptr, vocab, wanted, low, high, top, scale, counts: tl.constexpr, BLOCK: tl.constexpr):
    """The largest mark above which as much lies as is wanted, computed from the whole line."""
    middle = low + (high - low) * 0.5
    while (middle > low) & (middle < high):
        enough = _amount(logits_ptr, vocab, middle, top, scale, counts, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) * 0.5
    return low


@triton.jit(do_not_specialize=["lines"])
def _finish_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, record_ptr, list_ptr, threshold_ptr, rounds,
    vocab, lines, LIST: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    scale, _min_p, top_k, top_p = terms_of(line, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, vocab)
    top, wanted, low, high, over, between, state = load_record(record_ptr, rounds * lines + line)
    if state > 0.0:
        j = tl.arange(0, LIST)
        x = tl.load(list_ptr + line * LIST + j, mask=j < between, other=-float("inf"))
        weights = tl.exp2((x - top) * scale)
        high = tl.minimum(high, top)
        if top_k > 0:
            low = _bisect(x, (j < between).to(tl.float32), over, wanted, low, high, STEPS)
            over = 0.0  # top-p wants a list of everything
            high = top
            wanted = top_p * tl.sum(tl.where(x >= low, weights, 0.0), 0)
        if top_p < 1.0:
            low = _bisect(x, weights, over, wanted, low, high, STEPS)
    if state == SEARCHING:
        logits = logits_ptr + line * vocab
        if top_k > 0:
            low = _bisect_all(logits, vocab, wanted, low, high, top, scale, True, CHUNK)
            high = top
            if top_p < 1.0:
                wanted = top_p * _amount(logits, vocab, low, top, scale, False, CHUNK)
        if top_p < 1.0:
            low = _bisect_all(logits, vocab, wanted, low, high, top, scale, False, CHUNK)
    tl.store(threshold_ptr + line, tl.minimum(low, top))


def filter_threshold(
    logits: torch.Tensor,  # [lines, vocabulary], contiguous, any float type
    rows: torch.Tensor,  # [lines]: which entries of the parameters below each line uses
    temperature: torch.Tensor,  # [rows] float32
    min_p: torch.Tensor,  # [rows] float32; 0: off
    top_k: torch.Tensor,  # [rows] int32; 0: off
    top_p: torch.Tensor,  # [rows] float32; 1: off
) -> torch.Tensor:
    """See reference.filter_threshold."""
    lines, vocab = logits.shape
    chunks = cdiv(vocab, CHUNK)
    terms = (logits, rows, temperature, min_p, top_k, top_p)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    stats, candidates, threshold = floats(lines, chunks, 3), floats(lines, LIST), floats(lines)
    records, marks = floats(ROUNDS + 1, lines, RECORD.value), floats(ROUNDS, lines, MARKS)
    masses = floats(ROUNDS, lines, chunks, MARKS)
    counts = torch.empty(masses.shape, dtype=torch.int32, device=logits.device)
    shape = dict(CHUNKS=next_power_of_2(chunks), CHUNK=CHUNK, MARKS=MARKS, LIST=LIST)
    grid = (lines, chunks)
    _weigh_kernel[grid](*terms, stats, vocab, chunks, CHUNK=CHUNK, num_warps=8)
    for round in range(ROUNDS):
        _survey_kernel[grid](
            *terms,
            stats,
            records,
            marks,
            counts,
            masses,
            round,
            vocab,
            lines,
            chunks,
            FIRST=round == 0,
            num_warps=4,
            **shape,
        )
    _fill_kernel[grid](
        *terms, records, marks, counts, masses, candidates, ROUNDS, vocab, lines, chunks, num_warps=8, **shape
    )
    _finish_kernel[(lines,)](
        *terms, records, candidates, threshold, ROUNDS, vocab, lines, LIST=LIST, CHUNK=CHUNK, STEPS=STEPS, num_warps=8
    )
    return threshold


# ----------------------------------------------------------------
# The state of each line's search, and how one round narrows it.
#
# Every program of a line computes the state for itself from the results of the launch before. All add the same numbers
# in the same order, so they agree.

# A line's search after a round, 8 float32: the highest logit, how much is wanted (negative: a share of what is over
# `low`), the bounds low <= edge < high, what is over `high`, how many logits lie between, and the state: one of the two
# below, or 1 + round * MARKS + mark when those between can be listed (at places given by the counts of that round).
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
    """The state of a search before its first round: top, wanted, low, state."""
    c = tl.arange(0, CHUNKS)
    stats = stats_ptr + (line * chunks + c) * 3
    tops = tl.load(stats, mask=c < chunks, other=-float("inf"))
    top = tl.maximum(tl.max(tops, 0), -1.0e30)
    bottom = tl.min(tl.load(stats + 1, mask=c < chunks, other=float("inf")), 0)
    sums = tl.load(stats + 2, mask=c < chunks, other=0.0)
    total = tl.sum(tl.where(tops == -float("inf"), 0.0, sums * tl.exp2((tops - top) * scale)), 0)
    low = tl.maximum(bottom, top - 200.0 / scale)  # below this a weight is 0
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
    """The record of a search after `round`. The pointers are those of the first round."""
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
