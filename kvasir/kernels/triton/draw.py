"""One token per row from its logits: the best one, or a draw at the row's temperature. One read of the logits.

The first kernel leaves each chunk's best token after noise, the second picks the best chunk (see kernels/reference.py,
whose hash is repeated here).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvasir.kernels.reference import NOT_A_TOKEN
from kvasir.kernels.triton.launch import await_previous, cdiv, early, next_power_of_2

CHUNK = 1024


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, token):
    """A token's noise: reference.gumbel_noise in float32, from the same 32 bits."""
    flip = _mix(_mix(seed.to(tl.uint32)) + position.to(tl.uint32) * 0x9E3779B1)
    shift = _mix(flip ^ 0x5BD1E995)
    hashed = _mix(((token.to(tl.uint32) * 0x85EBCA77) ^ flip) + shift)
    small = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    large = ((hashed ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - small, without its rounding
    # -log(1 - small); the device's logarithm is too coarse near 1
    series = small * (1 + small * (1 / 2 + small * (1 / 3 + small * (1 / 4 + small * (1 / 5 + small * (1 / 6))))))
    return -tl.log(tl.where(small < 0.0625, series, -tl.log(large)))


@triton.jit
def _load(logits_ptr, line, i, vocab):
    """Logits of a line; -inf past its end."""
    return tl.load(logits_ptr + line * vocab + i, mask=i < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _filter(x, threshold_ptr, line, FILTERED: tl.constexpr):
    """Logits of a line; -inf where a filter dropped them."""
    if FILTERED:
        x = tl.where(x >= tl.load(threshold_ptr + line), x, -float("inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def _best_of_chunk_kernel(
    logits_ptr, threshold_ptr, row_ptr, temperature_ptr, seed_ptr, position_ptr, best_ptr, top_ptr, vocab, chunks,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(row_ptr + line)
    temperature = tl.load(temperature_ptr + row)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = _load(logits_ptr, line, i, vocab)
    broken = tl.max((raw != raw).to(tl.int32), 0)  # a chunk with a logit that is not a number has no top
    x = _filter(raw, threshold_ptr, line, FILTERED)
    if temperature > 0:
        x += temperature * _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + line), i)
    tl.store(top_ptr + line * chunks + chunk, tl.where(broken > 0, float("nan"), tl.max(x, 0)))
    tl.store(best_ptr + line * chunks + chunk, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _best_chunk_kernel(
    row_ptr, best_ptr, top_ptr, out_ptr, next_ptr, vocab, chunks,
    NOT_A_TOKEN: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    line = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + line * chunks + c, mask=c < chunks, other=-float("inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0)  # see _best_of_chunk_kernel
    token = tl.load(best_ptr + line * chunks + tl.argmax(tl.where(tops == tops, tops, -float("inf")), 0))
    # logits that are not numbers may point past the end
    tl.store(next_ptr + tl.load(row_ptr + line), tl.minimum(tl.maximum(token, 0), vocab - 1))
    tl.store(out_ptr + line, tl.where(broken > 0, NOT_A_TOKEN, token))


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
    chunks = cdiv(vocab, CHUNK)
    tops = torch.empty(lines, chunks, dtype=torch.float32, device=logits.device)
    best = torch.empty(lines, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(lines, dtype=torch.int32, device=logits.device)
    launch = early(logits)
    _best_of_chunk_kernel[(lines, chunks)](
        logits, logits if threshold is None else threshold, rows, temperature, seeds, positions, best, tops, vocab,
        chunks, FILTERED=threshold is not None, CHUNK=CHUNK, num_warps=4, **launch,
    )  # fmt: skip
    _best_chunk_kernel[(lines,)](
        rows, best, tops, tokens, next_token, vocab, chunks,
        NOT_A_TOKEN=NOT_A_TOKEN, CHUNKS=next_power_of_2(chunks), num_warps=4, **launch,
    )  # fmt: skip
    return tokens
