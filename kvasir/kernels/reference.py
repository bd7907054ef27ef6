"""The definition of each operation in plain torch, for any device.

Roundings are those of transformers, so that bfloat16 results stay as near to it as the order of sums allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kvasir.kernels.layout import AdapterMatrices, TokenSlots

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# What the sixteen codes of a 4-bit float stand for. NF4's are the quantiles of a normal distribution, as published.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
LEVELS: dict[str, tuple[float, ...]] = {
    "e2m1": (*_E2M1, *(-level for level in _E2M1)),
    "fp4": (*_FP4, *(-level for level in _FP4)),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
ANY_TOKEN = -1  # matches every token where tokens are compared
NOT_A_TOKEN = -1  # what `draw` returns for logits that are not numbers


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension: in float32, rounded to the gain's type before the gain, to x's after it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(x + residual), and the sum. The sum may take residual's memory. x may be parts [parts, rows, width]."""
    residual = (x.sum(0) + residual).to(residual.dtype) if x.dim() > residual.dim() else x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean and variance of the last dimension normalised, in float32; of x + residual, where one is given."""
    return F.layer_norm(x if residual is None else x + residual, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """layer_norm(x + residual), and the sum. The sum may take residual's memory."""
    residual = x + residual
    return layer_norm(residual, weight, bias, eps), residual


def gated_activation(x: torch.Tensor, kind: str | tuple[float, float]) -> torch.Tensor:
    """x [tokens, 2 * n]: the activation of the left half, times the right half. `kind` is a name of ACTIVATIONS, or
    (alpha, limit) of the clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit`, up between
    -limit and limit."""
    gate, up = x.chunk(2, dim=-1)
    if isinstance(kind, str):
        return ACTIVATIONS[kind](gate) * up
    alpha, limit = kind
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))


def copy_blocks(
    source: torch.Tensor,  # [layers, blocks, page_bytes] uint8
    target: torch.Tensor,
    source_index: torch.Tensor,  # [n] int32
    target_index: torch.Tensor,
) -> None:
    """Copy blocks in all layers. No block may be read and written in one call."""
    target[:, target_index.long()] = source[:, source_index.long()]


def rotary(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    positions: torch.Tensor,  # [tokens]
    table: torch.Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first rotary_dim of each head: half against half (the NeoX way), or neighbours (the GPT-J way)."""
    cos, sin = table.index_select(0, positions).to(query.dtype).unsqueeze(1).chunk(2, dim=-1)
    rotate = _rotate_neighbours if interleaved else _rotate
    return rotate(query, cos, sin), rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]), dim=-1)


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    left, right = turned[..., ::2], turned[..., 1::2]
    turned = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def store_kv(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim], any strides
    slots: torch.Tensor,  # [tokens] int64, block * block_size + offset, none negative
    k_scale: float = 1.0,  # a cache of 8-bit floats holds values divided by these
    v_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot."""
    block_size, dtype = kv_cache.shape[2], kv_cache.dtype
    place = (slots // block_size, slots % block_size)
    if dtype.itemsize == 1:  # torch puts bytes anywhere, 8-bit floats only on some devices
        key, value = (
            _to_eight_bits(x, unit, dtype).view(torch.uint8) for x, unit in ((key, k_scale), (value, v_scale))
        )
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache[:, 0].index_put_(place, key)
    kv_cache[:, 1].index_put_(place, value)


def _to_eight_bits(x: torch.Tensor, unit: float, dtype: torch.dtype) -> torch.Tensor:
    """Values that are too large become the largest one, neither infinite nor NaN."""
    most = torch.finfo(dtype).max
    return (x.float() / unit).clamp(-most, most).to(dtype)


def rope_store(
    qkv: torch.Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim]
    heads: int,
    positions: torch.Tensor,  # [tokens]
    table: torch.Tensor | None,  # [positions, rotary_dim] float32: cosines, then sines; None: nothing is rotated
    kv_cache: torch.Tensor,  # [blocks, 2, block_size, kv_heads, head_dim], any strides
    slots: torch.Tensor,  # [tokens] int64
    q_gain: torch.Tensor | None = None,  # [head_dim]: queries and keys are normalised before they are rotated
    k_gain: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,  # rotate neighbours instead of halves
    k_scale: float = 1.0,  # see store_kv
    v_scale: float = 1.0,
) -> torch.Tensor:
    """All between the qkv product and attention. Returns the queries [tokens, heads, head_dim]; the keys and
    values are in the cache afterwards."""
    kv_heads, head_dim = kv_cache.shape[3:]
    query, key, value = qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_gain is not None and k_gain is not None:
        query, key = rms_norm(query, q_gain, eps), rms_norm(key, k_gain, eps)
    if table is not None:
        query, key = rotary(query, key, positions, table, interleaved)
    store_kv(key, value, kv_cache, slots, k_scale, v_scale)
    return query


def latent_store(
    query: torch.Tensor,  # [tokens, heads, plain_dim + rotary_dim]
    cached: torch.Tensor,  # [tokens, latent_dim + rotary_dim]
    positions: torch.Tensor,  # [tokens]
    table: torch.Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    kv_cache: torch.Tensor,  # [blocks, block_size, latent_dim + rotary_dim], any strides
    slots: torch.Tensor,  # [tokens] int64
    gain: torch.Tensor,  # [latent_dim]
    eps: float,
    interleaved: bool = False,
    unit: float = 1.0,  # see store_kv
) -> torch.Tensor:
    """Compute everything between the projections and attention over a latent cache. Returns the queries, with their
    last part rotated; it may take query's memory. Afterwards the normalised vector and the rotated key are in the
    cache."""
    (latent,), rotated = gain.shape, table.shape[1]
    plain = query.shape[2] - rotated
    vector = rms_norm(cached[:, :latent], gain, eps)
    turned, key = rotary(query[..., plain:], cached[:, None, latent:], positions, table, interleaved)
    entry, block_size = torch.cat((vector, key[:, 0]), dim=-1), kv_cache.shape[1]
    if kv_cache.dtype.itemsize == 1:  # torch puts bytes anywhere, 8-bit floats only on some devices
        entry = _to_eight_bits(entry, unit, kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache.index_put_((slots // block_size, slots % block_size), entry)
    return torch.cat((query[..., :plain], turned), dim=-1)


def step_inputs(
    rows: torch.Tensor,  # [sequences] int64
    num_tokens: torch.Tensor,  # [sequences] int32: of each
    token_ids: torch.Tensor,  # [tokens] int32, of all; below 0 where the row's next token is meant
    num_computed: torch.Tensor,  # [rows] int32; the step's tokens are added
    next_token: torch.Tensor,  # [rows] int32
    tables: torch.Tensor,  # [rows, blocks] int32
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Ids, positions and slots of the tokens (int64); where each sequence begins among them, and the end, and how long
    each is after the step (int32)."""
    before, query_start = num_computed[rows], F.pad(num_tokens.cumsum(0, dtype=torch.int32), (1, 0))
    seq_lens = before + num_tokens
    token_rows, positions = rows, before.long()
    if len(token_ids) != len(rows):
        line = torch.arange(len(rows), device=rows.device)
        line = torch.repeat_interleave(line, num_tokens.long(), output_size=len(token_ids))
        offset = torch.arange(len(token_ids), device=rows.device) - query_start[line]
        token_rows, positions = rows[line], before[line] + offset
    ids = torch.where(token_ids >= 0, token_ids, next_token[token_rows]).long()
    slots = tables[token_rows, positions // block_size].long() * block_size + positions % block_size
    num_computed[rows] = seq_lens
    return ids, positions, slots, query_start, seq_lens


def _asking(rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lines that ask, and their slots. On a GPU this waits for the device, which counts them."""
    held = slots[rows]
    lines = (held >= 0).nonzero().squeeze(1)
    return lines, held[lines].long()


def penalize(
    logits: torch.Tensor,  # [n, vocabulary] float32
    rows: torch.Tensor,  # [n]: the row of each line
    slots: torch.Tensor,  # [rows] int32: the line of the tables below that a row uses; -1: its logits stay as they are
    counts: torch.Tensor,  # [slots, vocabulary] int32: how often each token was generated
    in_prompt: torch.Tensor,  # [slots, vocabulary] bool
    presence: torch.Tensor,  # [slots] float32
    frequency: torch.Tensor,  # [slots] float32
    repetition: torch.Tensor,  # [slots] float32
) -> None:
    """Apply penalties for tokens that occurred before, in place."""
    lines, own = _asking(rows, slots)
    x, seen = logits[lines], counts[own]
    generated = seen > 0
    factor = torch.where(generated | in_prompt[own], repetition[own, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    x -= frequency[own, None] * seen + presence[own, None] * generated
    logits[lines] = x


def count_tokens(
    tokens: torch.Tensor,  # [n] int32
    rows: torch.Tensor,  # [n]: the row of each
    slots: torch.Tensor,  # [rows] int32: the line of the table that a row uses; -1: its token is not counted
    counts: torch.Tensor,  # [slots, vocabulary] int32
) -> None:
    lines, own = _asking(rows, slots)
    counts.index_put_((own, tokens[lines].long()), torch.ones_like(tokens[lines]), accumulate=True)


def add_bias(
    logits: torch.Tensor,  # [n, vocabulary] float32
    rows: torch.Tensor,  # [n]: the row of each line
    slots: torch.Tensor,  # [rows] int32: the line of the tables that a row uses; -1: its logits stay as they are
    ids: torch.Tensor,  # [slots, m] int32
    values: torch.Tensor,  # [slots, m] float32, 0 where `ids` is only padded
) -> None:
    """Add numbers to some tokens' logits, in place."""
    lines, own = _asking(rows, slots)
    logits[lines] = logits[lines].scatter_add(1, ids[own].long(), values[own])


def mask_logits(
    logits: torch.Tensor,  # [n, vocabulary]
    rows: torch.Tensor,  # [n]: the row of each line
    slots: torch.Tensor,  # [rows] int32: whose bits a row uses; -1: its logits stay as they are
    allowed: torch.Tensor,  # [slots, vocabulary / 32, rounded up] int32: a token's bit, the lowest first, says yes
) -> None:
    """Put the logits of tokens that are not allowed to minus infinity, in place."""
    lines, own = _asking(rows, slots)
    bits = (allowed[own, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[lines] = logits[lines].masked_fill(forbidden, float("-inf"))


def ban_words(
    logits: torch.Tensor,  # [n, vocabulary] float32
    rows: torch.Tensor,  # [n]: the row of each line
    slots: torch.Tensor,  # [rows] int32: the line of the tables that a row uses; -1: its logits stay as they are
    beginnings: torch.Tensor,  # [slots, words, tokens] int32: all of a word but its last token; ANY_TOKEN matches all
    ends: torch.Tensor,  # [slots, words] int32: the last one
    recent: torch.Tensor,  # [slots, tokens] int32: generated last
) -> None:
    """Put the last token of words that have just been begun to minus infinity, in place."""
    lines, own = _asking(rows, slots)
    known = beginnings[own]
    same = (known == recent[own, None]) | (known == ANY_TOKEN)
    change = torch.where(same.all(dim=-1), -torch.inf, 0.0)
    logits[lines] = logits[lines].scatter_add(1, ends[own].long(), change)


def push_tokens(
    tokens: torch.Tensor,  # [n] int32
    rows: torch.Tensor,  # [n]: the row of each
    slots: torch.Tensor,  # [rows] int32: the line of the table that a row uses; -1: its token is not kept
    recent: torch.Tensor,  # [slots, tokens] int32
) -> None:
    """Add each token at the end of its line, which forgets its first."""
    lines, own = _asking(rows, slots)
    recent[own] = torch.cat([recent[own, 1:], tokens[lines, None]], dim=1)


def filter_threshold(
    logits: torch.Tensor,  # [lines, vocabulary], any float type
    rows: torch.Tensor,  # [lines]: which entries of the parameters below each line uses
    temperature: torch.Tensor,  # [rows] float32
    min_p: torch.Tensor,  # [rows] float32; 0: off
    top_k: torch.Tensor,  # [rows] int32; 0: off
    top_p: torch.Tensor,  # [rows] float32; 1: off
) -> torch.Tensor:
    """The lowest logit that each line keeps, [lines] float32: min-p, then top-k, then top-p, each over what the one
    before left. Equal logits are kept or dropped together, and the best always stays."""
    heat, min_p, top_k, top_p = (x[rows, None] for x in (temperature, min_p, top_k, top_p))
    vocab = logits.shape[-1]
    scaled = logits.float() / torch.where(heat > 0, heat, 1.0)
    best = scaled.max(dim=-1, keepdim=True).values
    least = best + min_p.log()  # p(token) >= min_p * p(best) is a difference of logits; log(0) = -inf turns it off
    weights = torch.where(scaled >= least, torch.exp(scaled - best), 0.0)
    limit = torch.where(top_k > 0, top_k, vocab)
    count = min(vocab, 1024)
    while True:  # the likeliest tokens nearly always suffice; a flat distribution needs more of them
        ordered, places = scaled.topk(count, dim=-1)
        kept = (ordered >= least) & (torch.arange(count, device=logits.device) < limit)
        mass = weights.gather(1, places) * kept
        total = torch.where(limit <= count, mass.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
        inside = kept & ((mass.cumsum(dim=-1) - mass < top_p * total) | (top_p >= 1))  # a sum may reach 1 by rounding
        # known once one of them is dropped, or all are kept; top-p also needs the total mass
        known = ~inside[:, -1:] & ((limit <= count) | (limit >= vocab) | (top_p >= 1))
        if count == vocab or bool((known | (heat == 0)).all()):
            break
        count = min(vocab, 8 * count)
    last = inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1  # those inside stand first
    threshold = logits.gather(1, places.gather(1, last)).float().squeeze(1)
    on = (heat > 0) & ((min_p > 0) | (top_k > 0) | (top_p < 1))
    return torch.where(on[:, 0], threshold, -torch.inf)


def draw(
    logits: torch.Tensor,  # [lines, vocabulary], any float type
    rows: torch.Tensor,  # [lines]: which entries of the parameters below each line uses
    positions: torch.Tensor,  # [lines]
    temperature: torch.Tensor,  # [rows] float32; 0: the best token
    seeds: torch.Tensor,  # [rows] int32
    next_token: torch.Tensor,  # [rows] int32: the token is written here too
    threshold: torch.Tensor | None = None,  # [lines] float32: the lowest logit that each line keeps
) -> torch.Tensor:
    """One token per line, [lines] int32: the one with the largest logit + temperature * noise (Gumbel-max: a token is
    drawn with its probability). The noise depends on the row's seed, the position and the token alone, so a small
    change of the logits rarely changes the token. NOT_A_TOKEN for a line with a logit that is not a number;
    `next_token` is a valid token even then, because a step may read it before the host ends the row."""
    broken = logits.isnan().any(dim=-1)
    if threshold is not None:
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    heat = temperature[rows]
    noise = gumbel_noise(seeds[rows].long() & MASK, positions.long(), logits.shape[-1])
    noisy = logits.double() + heat.double()[:, None] * noise
    tokens = torch.where(heat > 0, noisy.argmax(dim=-1), logits.argmax(dim=-1)).to(torch.int32)
    next_token[rows] = tokens
    return tokens.masked_fill(broken, NOT_A_TOKEN)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in], plus bias [out]."""
    return F.linear(x, weight, bias)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """x [rows, in] times each group's own matrix, weight [groups, out, in]; group g has the rows starts[g] up to
    starts[g + 1]. This version waits for the device, which has the starts."""
    out = x.new_empty(len(x), weight.shape[1])
    bounds = starts.tolist()
    for matrix, begin, end in zip(weight, bounds, bounds[1:], strict=False):
        if begin < end:
            out[begin:end] = F.linear(x[begin:end], matrix)
    return out


def coded_linear(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times a quantized matrix (quantization.coded.Coded), plus bias [out]."""
    return F.linear(x, matrix.expand(x.dtype), bias)


def grouped_coded_linear(x: torch.Tensor, matrices: Any, starts: torch.Tensor) -> torch.Tensor:
    """Like grouped_linear; the groups' matrices are stacked in one Coded of [groups * out, in]."""
    weight = matrices.expand(x.dtype)
    return grouped_linear(x, weight.view(len(starts) - 1, -1, weight.shape[1]), starts)


def adapt(x: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, slots: TokenSlots) -> torch.Tensor:
    """y [tokens, out], the product of x [tokens, in] with a layer's matrix, as the tokens' adapters change it; see
    AdapterMatrices. y is overwritten. This version waits for the device, which has the slots."""
    uses, size = matrices.uses.tolist(), matrices.rank
    for slot, tokens in slots.groups:
        rank, is_moved = uses[slot]
        if not rank and not is_moved:
            continue
        own = y[tokens]
        if is_moved:
            own = (own.float() * matrices.gain[slot] + matrices.shift[slot]).to(y.dtype)
        if rank:
            low = F.linear(x[tokens], matrices.shrink[slot])
            begin = 0
            for part, outputs in enumerate(matrices.parts):
                columns = low[:, part * size : part * size + rank]
                own[:, begin : begin + outputs] += columns @ matrices.expand[slot, :rank, begin : begin + outputs]
                begin += outputs
        y[tokens] = own
    return y


def route(
    logits: torch.Tensor,  # [tokens, experts]
    top_k: int,
    scoring: str,  # "softmax" or "sigmoid"
    correction: torch.Tensor | None = None,  # [experts] float32: added to scores when experts are chosen
    groups: int = 1,  # experts stand in groups of equal size ...
    top_groups: int = 1,  # ... and are chosen from this many, the best
    by_two: bool = False,  # a group is as good as its best two experts together, not as its best
    normalise: bool = False,  # weights are divided by their sum
    scale: float = 1.0,  # of the weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts' weights in float32 and their numbers, each [tokens, top_k], the best first. Among
    equally good experts any may be taken."""
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    choice = scores if correction is None else scores + correction
    if groups > top_groups:
        grouped = choice.view(len(choice), groups, -1)
        quality = grouped.topk(2, dim=-1).values.sum(-1) if by_two else grouped.amax(-1)
        best = quality.topk(top_groups, dim=-1).indices
        outside = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * scale if scale != 1.0 else weights), chosen


def experts(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, top_k] float32
    chosen: torch.Tensor,  # [tokens, top_k]; one past the last expert: nobody, with a weight of 0
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]: an expert's gate, then its up
    down: torch.Tensor,  # [experts, hidden, inner]
    activation: str | tuple[float, float],  # see gated_activation
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
    leave_parts: bool = False,  # the outputs of each of a token's experts may be left to `add_rms_norm` to sum
    is_apart: bool = False,  # whether some experts are nobody
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts. It is summed in float32 and in the router's
    order, so that the rest of the batch changes nothing. This version waits for the device, which knows the rows of
    each expert."""
    (tokens, top_k), count = chosen.shape, len(gate_up)
    order = torch.argsort(chosen.reshape(-1), stable=True)
    numbers = chosen.reshape(-1)[order]
    # Expert e's rows begin at the first number that is at least e.
    starts = torch.searchsorted(numbers, torch.arange(count + 1, device=x.device), out_int32=True)
    order, numbers = order[: int(starts[-1])], numbers[: int(starts[-1])]
    both = grouped_linear(x[order // top_k], gate_up, starts)
    both = both if gate_up_bias is None else both + gate_up_bias[numbers]
    sorted_y = grouped_linear(gated_activation(both, activation), down, starts)
    sorted_y = sorted_y if down_bias is None else sorted_y + down_bias[numbers]
    y = sorted_y.new_zeros(tokens * top_k, sorted_y.shape[1])
    y[order] = sorted_y
    return (y.view(tokens, top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)


def fused_linear(
    x: torch.Tensor,  # [rows, in]
    weight: torch.Tensor,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
    *,
    gain: torch.Tensor | None = None,  # [in]: x goes through an RMS norm first
    eps: float = 0.0,
    add: torch.Tensor | None = None,  # [rows, out]: added to the result
    gated: bool = False,  # half of the outputs: silu of the first half times the second
    product: Callable[..., torch.Tensor] = linear,
) -> torch.Tensor:
    """A product together with the operations before and after it in a layer."""
    y = product(x if gain is None else rms_norm(x, gain, eps), weight, bias)
    y = gated_activation(y, "silu") if gated else y
    return y if add is None else y + add


def fused_experts(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str | tuple[float, float],
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor,  # [hidden]: what experts get goes through an RMS norm first
    eps: float,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,  # gate and up, and down, of an expert that all go to
    product: Callable[..., torch.Tensor] = linear,
) -> torch.Tensor:
    """Return x plus the outputs of `experts` and of the shared expert for the norm of x."""
    normed = rms_norm(x, gain, eps)
    y = x + experts(normed, weights, chosen, gate_up, down, activation, gate_up_bias, down_bias)
    if shared is None:
        return y
    return y + product(gated_activation(product(normed, shared[0]), activation), shared[1])


# ----------------------------------------------------------------
# Stateless random numbers: noise depends on (seed, position, token) alone, whatever else is in the batch.

MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash with low bias (two multiply-xorshift rounds), in int64 so that nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def hash_tokens(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[n, vocabulary] 32 bits for each token of each (seed, position) [n]. All int64, seeds of 32 bits."""
    flip = _mix((_mix(seeds) + positions * 0x9E3779B1) & MASK)
    shift = _mix(flip ^ 0x5BD1E995)
    steps = (torch.arange(vocabulary, device=seeds.device) * 0x85EBCA77) & MASK
    return _mix(((steps ^ flip[:, None]) + shift[:, None]) & MASK)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[n, vocabulary] float64: minus the logarithms of exponentially distributed numbers."""
    uniform = (hash_tokens(seeds, positions, vocabulary) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def lookup_drafts(
    history: torch.Tensor,  # [all rows, width] int32: each row's text
    rows: torch.Tensor,  # [n] int64
    lengths: torch.Tensor,  # [n] int32: tokens of each text
    drafts: torch.Tensor,  # [all rows, drafts] int32: written
    counts: torch.Tensor,  # [all rows] int32: how many drafts each row has; written
    shortest: int,  # tokens at the end of a text that must occur earlier in it, at least ...
    longest: int,  # ... and the most that are compared
    latest: bool,  # of equally long matches the latest counts, and a text that repeats itself goes on doing so
) -> None:
    """Draft the tokens that followed the text's last tokens where they occurred before. The place with the longest
    match is taken, and of several the earliest unless `latest`."""
    size, width = drafts.shape[1], int(lengths.max())
    text, end = history[rows, :width], lengths.long()
    final = text.gather(1, end[:, None] - 1)
    found = (text == final) & (torch.arange(width, device=text.device) < end[:, None] - 1)
    line, place = found.nonzero(as_tuple=True)  # where the last token occurs before
    matched, alive = torch.ones_like(place), torch.ones_like(found[line, place])
    for back in range(1, longest):
        here, there = place - back, end[line] - 1 - back
        alive = alive & (here >= 0) & (text[line, here.clamp(min=0)] == text[line, there.clamp(min=0)])
        if not bool(alive.any()):
            break
        matched += alive
    score = matched * (width + 1) + (place if latest else width - place)
    score = torch.where(matched >= shortest, score, -1)
    best = torch.full_like(end, -1).scatter_reduce(0, line, score, "amax")
    rank = best % (width + 1)
    start = torch.where(best < 0, 0, (rank if latest else width - rank) + 1)
    columns = torch.arange(size, device=text.device)
    period = (end - start).clamp(min=1)
    places = start[:, None] + columns % period[:, None]
    drafts[rows] = text.gather(1, places.clamp(max=width - 1)).to(drafts.dtype)
    most = torch.full_like(period, size) if latest else period.clamp(max=size)
    counts[rows] = torch.where(best < 0, 0, most).to(counts.dtype)


def accept_drafts(
    tokens: torch.Tensor,  # [lines] int32: drawn; below 0: not a token
    rows: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int32: the first line of each row
    lines: torch.Tensor,  # [n] int32: how many it has: one, and one for each draft that was verified
    drafts: torch.Tensor,  # [all rows, drafts] int32
    counts: torch.Tensor,  # [all rows] int32: how many drafts were proposed for each row
    num_computed: torch.Tensor,  # [all rows] int32: lowered by the drafts that were wrong
    next_token: torch.Tensor,  # [all rows] int32: the last token that counts is written here
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's tokens, [n, 1 + drafts] int32, and how many of them count, [n] int32: the drafts that agree with the
    tokens drawn in their places, and one token more."""
    columns = torch.arange(1 + drafts.shape[1], dtype=torch.int32, device=tokens.device)
    own = tokens[starts[:, None] + torch.minimum(columns, lines[:, None] - 1)]
    known = columns[:-1] < torch.minimum(lines - 1, counts[rows])[:, None]
    agrees = (own[:, :-1] == drafts[rows]) & known
    taken = 1 + agrees.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    next_token[rows] = own.gather(1, taken[:, None].long() - 1).squeeze(1).clamp(min=0)
    num_computed[rows] -= lines - taken
    return own, taken


def encoder_attention(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,
    query_start: torch.Tensor,  # [sequences + 1] int32: where each sequence begins
    query_lens: NDArray[np.int32],  # [sequences] the same as lengths, on the host; on a GPU upper bounds will do
    scale: float,
    reach: int | None = None,  # tokens that one sees on either side; None: all of its sequence
    bias: torch.Tensor | None = None,  # [heads, 2 * n - 1] added to scores, in the order of key - query
    softcap: float | None = None,  # scores s become softcap * tanh(s / softcap) before any is hidden
) -> torch.Tensor:
    """[tokens, heads, head_dim]: every token attends to the tokens of its own sequence, before and after it.

    Sequences of one length are attended to in one call, others one after another: on a CPU a call costs little beside
    the products of a layer, and nothing is padded.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    heads, kv_heads = query.shape[1], key.shape[1]
    start = 0
    for length, count in _runs(query_lens):
        end = start + length * count
        q, k, v = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
        if kv_heads != heads:
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        mask = _mask(length, reach, bias, query)
        if softcap is None:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
            scores = scores if mask is None else scores + mask
            seen = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ v
        out[start:end].unflatten(0, (count, length)).copy_(seen.transpose(1, 2))
        start = end
    return out


def _runs(lengths: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Runs of neighbours of equal length, as (length, how many)."""
    found: list[tuple[int, int]] = []
    for length in lengths.tolist():
        if found and found[-1][0] == length:
            found[-1] = (length, found[-1][1] + 1)
        else:
            found.append((length, 1))
    return found


def _mask(length: int, reach: int | None, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """[heads or 1, length, length] to add to scores; None: nothing."""
    mask = None
    if bias is not None:
        middle = bias.shape[1] // 2
        # Line i of a window over the distances holds those of query i: its first key is i before it.
        near = bias[:, middle - length + 1 : middle + length].to(like.dtype)
        mask = near.unfold(1, length, 1).flip(1)
    if reach is not None and reach < length - 1:
        at = torch.arange(length, device=like.device)
        hidden = (at[:, None] - at[None]).abs() > reach
        far = torch.zeros(1, length, length, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
        mask = far if mask is None else mask + far
    return mask
