"""Min-p, top-k and top-p without a sort: the lowest logit that each row keeps.

One program per row. It reads the row twice: for the maximum and the sum, then to put what is likely enough into a short
list, in the order of the vocabulary, so that every sum comes out the same each time. Thresholds are found there by
bisection. A row too flat for the list is bisected over the whole vocabulary instead: slower, and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LIST = 4096  # candidates a row may have
BLOCK = 4096


@triton.jit
def _count_and_mass(row_ptr, vocab, least, mark, top, scale, BLOCK: tl.constexpr):
    """Of the logits that are at least `least` and `mark`: how many, and their weights' sum."""
    count = 0
    mass = 0.0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
        kept = (x >= tl.maximum(least, mark)) & (i < vocab)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp2((x - top) * scale), 0.0), 0)
    return count, mass


@triton.jit
def _floor_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, list_ptr, floor_ptr, vocab,
    LIST: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + line)
    heat = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if heat == 0.0 or (min_p == 0.0 and top_k == 0 and top_p >= 1.0):
        tl.store(floor_ptr + line, -float("inf"))
        return
    scale = 1.4426950408889634 / heat
    logits = logits_ptr + line * vocab
    top = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2((top - higher) * scale) + tl.sum(tl.exp2((x - higher) * scale), 0)
        top = higher
    least = tl.full([], -float("inf"), tl.float32)
    if min_p > 0.0:
        least = top + tl.log2(min_p) / scale
    listed_from = tl.maximum(least, top + tl.log2(1.0e-5 * total) / scale)
    count = 0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
        kept = (x >= listed_from).to(tl.int32)
        at = count + tl.cumsum(kept, 0) - 1
        tl.store(list_ptr + line * LIST + at, x, mask=(kept == 1) & (at < LIST))
        count += tl.sum(kept, 0)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    j = tl.arange(0, LIST)
    x = tl.load(list_ptr + line * LIST + j, mask=j < count, other=-float("inf"))
    weights = tl.where(j < count, tl.exp2((x - top) * scale), 0.0)
    # The list will do if it has everything that min-p keeps, or enough for top-k; and enough mass for top-p.
    complete = (count <= LIST) & (listed_from == least)
    fits_k = (count <= LIST) & (complete | ((top_k > 0) & (count >= top_k)))
    floor = least
    if fits_k:
        if top_k > 0:
            low = listed_from
            high = top
            for _ in range(STEPS):
                middle = low + (high - low) * 0.5
                enough = tl.sum((x >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            floor = tl.maximum(floor, low)
    elif top_k > 0:
        low = tl.maximum(least, top - 200.0 / scale)
        high = top
        for _ in range(STEPS):
            middle = low + (high - low) * 0.5
            many, _mass = _count_and_mass(logits, vocab, least, middle, top, scale, BLOCK)
            low = tl.where(many >= top_k, middle, low)
            high = tl.where(many >= top_k, high, middle)
        floor = tl.maximum(floor, low)
    if top_p < 1.0:
        mass = tl.sum(tl.where(x >= floor, weights, 0.0), 0)
        if not fits_k:
            _many, mass = _count_and_mass(logits, vocab, least, floor, top, scale, BLOCK)
        wanted = top_p * mass
        low = tl.maximum(floor, top - 200.0 / scale)
        high = top
        if (count <= LIST) & (tl.sum(weights, 0) >= wanted):
            for _ in range(STEPS):
                middle = low + (high - low) * 0.5
                enough = tl.sum(tl.where(x >= middle, weights, 0.0), 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
        else:
            for _ in range(STEPS):
                middle = low + (high - low) * 0.5
                _many, here = _count_and_mass(logits, vocab, floor, middle, top, scale, BLOCK)
                low = tl.where(here >= wanted, middle, low)
                high = tl.where(here >= wanted, high, middle)
        floor = tl.maximum(floor, low)
    tl.store(floor_ptr + line, tl.minimum(floor, top))


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
    floor = torch.empty(lines, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(lines, LIST, dtype=torch.float32, device=logits.device)
    _floor_kernel[(lines,)](
        logits, rows, temperature, min_p, top_k, top_p, candidates, floor, vocab,
        LIST=LIST, BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), STEPS=40, num_warps=8,
    )  # fmt: skip
    return floor
