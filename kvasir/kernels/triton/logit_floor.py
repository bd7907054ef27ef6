"""Min-p, top-k and top-p without a sort: the lowest logit that each line keeps.

A search for the largest mark over which there is enough: top_k logits, or top_p of the mass. Parallel over the
vocabulary, in launches that do not depend on data, so that they can sit in a CUDA graph:

1. weigh: each chunk's highest and lowest logit and sum of weights. They bound the search.
2. survey, ROUNDS times: MARKS marks between the bounds; each chunk counts and weighs what is over each. The next launch
   adds that up and goes on between two neighbouring marks. Chunks that lie under all marks are not read.
3. fill: once few enough logits lie between the marks (in most lines after the first round), they go into a list, in the
   order of the vocabulary.
4. finish: one program per line bisects on its list. Only a line with thousands of equal logits at the edge is left over
   here; it is bisected over the whole vocabulary: slower, and as exact.

All programs of a line add the same numbers in the same order: a line's result depends on that line alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.logit_search import (
    RECORD,
    SEARCHING,
    SETTLED,
    load_record,
    narrow,
    open_search,
    store_record,
    terms_of,
)

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
    """The largest mark over which there is as much as wanted, by the list."""
    for _ in range(STEPS):
        middle = low + (high - low) * 0.5
        enough = over + tl.sum(tl.where(x >= middle, amounts, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _amount(logits_ptr, vocab, mark, top, scale, counts: tl.constexpr, BLOCK: tl.constexpr):
    """Of a whole line: how many logits are at least `mark`, or their weights' sum."""
    amount = 0.0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
        each = 1.0 if counts else tl.exp2((x - top) * scale)
        amount += tl.sum(tl.where((x >= mark) & (i < vocab), each, 0.0), 0)
    return amount


@triton.jit
def _bisect_all(logits_ptr, vocab, wanted, low, high, top, scale, counts: tl.constexpr, BLOCK: tl.constexpr):
    """The largest mark over which there is as much as wanted, by the whole line."""
    middle = low + (high - low) * 0.5
    while (middle > low) & (middle < high):
        enough = _amount(logits_ptr, vocab, middle, top, scale, counts, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) * 0.5
    return low


@triton.jit(do_not_specialize=["lines"])
def _finish_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, record_ptr, list_ptr, floor_ptr, rounds,
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
    tl.store(floor_ptr + line, tl.minimum(low, top))


def logit_floor(
    logits: torch.Tensor,  # [lines, vocabulary], contiguous, any float type
    rows: torch.Tensor,  # [lines]: which entries of the parameters below each line uses
    temperature: torch.Tensor,  # [rows] float32
    min_p: torch.Tensor,  # [rows] float32; 0: off
    top_k: torch.Tensor,  # [rows] int32; 0: off
    top_p: torch.Tensor,  # [rows] float32; 1: off
) -> torch.Tensor:
    """See reference.logit_floor."""
    lines, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    terms = (logits, rows, temperature, min_p, top_k, top_p)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    stats, candidates, floor = floats(lines, chunks, 3), floats(lines, LIST), floats(lines)
    records, marks = floats(ROUNDS + 1, lines, RECORD.value), floats(ROUNDS, lines, MARKS)
    masses = floats(ROUNDS, lines, chunks, MARKS)
    counts = torch.empty(masses.shape, dtype=torch.int32, device=logits.device)
    shape = dict(CHUNKS=triton.next_power_of_2(chunks), CHUNK=CHUNK, MARKS=MARKS, LIST=LIST)
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
        *terms, records, candidates, floor, ROUNDS, vocab, lines, LIST=LIST, CHUNK=CHUNK, STEPS=STEPS, num_warps=8
    )
    return floor
