"""One token per row from its logits: the best one, or a draw at the row's temperature. Two reads of the logits at most.

The first kernel leaves a maximum and a sum of weights per chunk of the vocabulary; the second picks the chunk and the
token inside it by inverse CDF with the row's own number (see kernels/reference.py, whose hash is repeated here).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.triton.launch import await_previous, early

CHUNK = 1024


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1) from the same 32 bits as reference.uniform."""
    hashed = _mix(_mix(seed.to(tl.uint32)) + position.to(tl.uint32) * 0x9E3779B1)
    return (hashed >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _load(logits_ptr, threshold_ptr, line, i, vocab, FILTERED: tl.constexpr):
    """Logits of a line; -inf past its end and where a filter dropped them."""
    x = tl.load(logits_ptr + line * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
    if FILTERED:
        x = tl.where(x >= tl.load(threshold_ptr + line), x, -float("inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "sum_ptr"])
def _weigh_kernel(
    logits_ptr, threshold_ptr, row_ptr, temperature_ptr, best_ptr, top_ptr, sum_ptr, vocab, chunks,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + tl.load(row_ptr + line))
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits_ptr, threshold_ptr, line, i, vocab, FILTERED)
    top = tl.max(x, 0)
    tl.store(top_ptr + line * chunks + chunk, top)
    if temperature > 0:
        scale = 1.4426950408889634 / temperature
        weights = tl.where(x == -float("inf"), 0.0, tl.exp2((x - tl.maximum(top, -1e30)) * scale))
        tl.store(sum_ptr + line * chunks + chunk, tl.sum(weights, 0))
    else:
        tl.store(best_ptr + line * chunks + chunk, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr", "sum_ptr"])
def _pick_kernel(
    logits_ptr, threshold_ptr, row_ptr, temperature_ptr, seed_ptr, position_ptr, best_ptr, top_ptr, sum_ptr, out_ptr,
    next_ptr, vocab, chunks, FILTERED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + line)
    temperature = tl.load(temperature_ptr + row)
    c = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + line * chunks + c, mask=c < chunks, other=-float("inf"))
    if temperature > 0:
        scale = 1.4426950408889634 / temperature
        top = tl.max(tops, 0)
        sums = tl.load(sum_ptr + line * chunks + c, mask=c < chunks, other=0.0)
        share = tl.where(tops == -float("inf"), 0.0, sums * tl.exp2((tops - top) * scale))
        total = tl.sum(share, 0)
        goal = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + line)) * total
        ends = tl.cumsum(share, 0)
        last_chunk = tl.max(tl.where(share > 0, c, 0), 0)  # rounding must not step past the last weight
        chunk = tl.minimum(tl.sum((ends <= goal).to(tl.int32), 0), last_chunk)
        before = tl.sum(tl.where(c < chunk, share, 0.0), 0)
        i = tl.arange(0, CHUNK)
        at = chunk * CHUNK + i
        x = _load(logits_ptr, threshold_ptr, line, at, vocab, FILTERED)
        weights = tl.where(x == -float("inf"), 0.0, tl.exp2((x - top) * scale))
        passed = tl.sum((tl.cumsum(weights, 0) <= goal - before).to(tl.int32), 0)
        last = tl.max(tl.where(weights > 0, i, 0), 0)
        token = chunk * CHUNK + tl.minimum(passed, last)
    else:
        token = tl.load(best_ptr + line * chunks + tl.argmax(tops, 0))
    token = tl.minimum(token, vocab - 1)  # logits that are not numbers may point past the end
    tl.store(out_ptr + line, token)
    tl.store(next_ptr + row, token)


def draw(
    logits: torch.Tensor,  # [lines, vocabulary], contiguous, any float type
    rows: torch.Tensor,  # [lines]: which entries of the parameters below each line uses
    positions: torch.Tensor,  # [lines]
    temperature: torch.Tensor,  # [rows] float32; 0: the best token
    seeds: torch.Tensor,  # [rows] int32
    next_token: torch.Tensor,  # [rows] int32: the token is written here too
    threshold: torch.Tensor | None = None,  # [lines] float32: the lowest logit that each line keeps
) -> torch.Tensor:
    """See reference.draw."""
    lines, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    tops, sums = torch.empty(2, lines, chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(lines, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(lines, dtype=torch.int32, device=logits.device)
    filtered = dict(FILTERED=threshold is not None, CHUNK=CHUNK, num_warps=4, **early(logits))
    threshold = logits if threshold is None else threshold  # not read
    _weigh_kernel[(lines, chunks)](logits, threshold, rows, temperature, best, tops, sums, vocab, chunks, **filtered)
    _pick_kernel[(lines,)](
        logits, threshold, rows, temperature, seeds, positions, best, tops, sums, tokens, next_token, vocab, chunks,
        CHUNKS=triton.next_power_of_2(chunks), **filtered,
    )  # fmt: skip
    return tokens
