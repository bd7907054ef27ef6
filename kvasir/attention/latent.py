"""Attention over a latent cache in plain torch, for any device: the reference the kernels must equal.

A decode applies each head's matrices to the query and to the result, and reads the cached vectors as they are: one key
and value for all heads. A chunk has many queries for each cached token, so keys and values are computed from the
vectors, some tokens at a time, and the results are merged by the sums of their weights. Nothing waits for the device.
"""

from __future__ import annotations

import torch

from kvasir.attention.base import AttentionBatch
from kvasir.attention.torch import DecodeGroup, group_decodes

PIECE = 4096  # tokens of a context whose keys and values are computed at once
MOST_SCORES = 1 << 24  # that a chunk computes at once


def attend_latent(
    query: torch.Tensor,  # [tokens, heads, plain_dim + rotary_dim]: a part for the vectors, and one that is rotated
    cache: torch.Tensor,  # [blocks, block_size, latent_dim + rotary_dim], any strides
    up: torch.Tensor,  # [heads, plain_dim + value_dim, latent_dim]
    batch: AttentionBatch,
    scale: float,  # of the scores
    unit: float,  # what the cache holds is divided by this
) -> torch.Tensor:  # [tokens, heads, value_dim]
    latent = up.shape[2]
    plain = query.shape[2] - (cache.shape[2] - latent)
    out = query.new_empty(*query.shape[:2], up.shape[1] - plain)
    if batch.num_decodes:
        for group in _groups(batch, cache):
            _attend_decodes(out, query, cache, up, group, plain, scale, unit)
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        end = start + int(batch.query_lens[row])
        # On a CPU the length is at hand; elsewhere there are no drafts, and a chunk's bound is its true length.
        length = int(batch.seq_lens[row] if batch.seq_lens.device.type == "cpu" else batch.seq_bounds[row])
        pages = batch.block_tables()[row, : -(-length // batch.block_size)]
        seen = _gather(cache, pages, 1, query.dtype, unit)[0, :length]
        _attend_chunk(out[start:end], query[start:end], seen, up, plain, scale, batch.causal)
        start = end
    return out


def _groups(batch: AttentionBatch, cache: torch.Tensor) -> list[DecodeGroup]:
    note = ("latent decodes", cache.shape[2])
    if note not in batch.step_cache:
        page_bytes = cache.shape[1] * cache.shape[2] * cache.element_size()
        batch.step_cache[note] = group_decodes(batch, page_bytes)
    groups: list[DecodeGroup] = batch.step_cache[note]
    return groups


def _gather(cache: torch.Tensor, pages: torch.Tensor, n: int, dtype: torch.dtype, unit: float) -> torch.Tensor:
    """What n rows' blocks hold, [n, keys, width]."""
    if cache.itemsize == 1:  # torch gathers bytes anywhere, 8-bit floats only on some devices
        found = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).to(dtype)
    else:
        found = cache.index_select(0, pages)
    found = found.view(n, -1, cache.shape[2])
    return found if unit == 1.0 else found * unit


def _attend_decodes(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    up: torch.Tensor,
    group: DecodeGroup,
    plain: int,
    scale: float,
    unit: float,
) -> None:
    n, latent = len(group.seq_lens), up.shape[2]
    seen = _gather(cache, group.pages, n, query.dtype, unit)
    visible = group.what_is_seen(None, query.dtype)
    visible.clear(seen[:, :, None])
    query = query[:n] if group.rows is None else query.index_select(0, group.rows)
    absorbed = torch.bmm(query[..., :plain].transpose(0, 1), up[:, :plain]).transpose(0, 1)
    scores = torch.cat((absorbed, query[..., plain:]), dim=-1) @ seen.transpose(1, 2) * scale
    weights = torch.softmax(scores + visible.mask[:, 0], dim=-1, dtype=torch.float32).to(query.dtype)
    sums = (weights @ seen[..., :latent]).transpose(0, 1)
    found = torch.bmm(sums, up[:, plain:].transpose(1, 2)).transpose(0, 1)
    if group.rows is None:
        out[:n] = found
    else:
        out.index_copy_(0, group.rows, found)


def _attend_chunk(
    out: torch.Tensor,  # [queries, heads, value_dim]
    query: torch.Tensor,
    seen: torch.Tensor,  # [keys, width]; the queries are the last of them
    up: torch.Tensor,
    plain: int,
    scale: float,
    causal: bool,
) -> None:
    heads, latent, context = query.shape[1], up.shape[2], len(seen) - len(query)
    step = max(16, MOST_SCORES // (heads * min(PIECE, len(seen))))
    for begin in range(0, len(query), step):
        end = min(begin + step, len(query))
        some = query[begin:end].transpose(0, 1)  # [heads, queries, dim]
        top = torch.full((heads, end - begin, 1), -torch.inf, device=query.device)
        total, sums = torch.zeros_like(top), torch.zeros(heads, end - begin, out.shape[2], device=query.device)
        last = context + end if causal else len(seen)
        for first in range(0, last, PIECE):
            piece = seen[first : min(first + PIECE, last)]
            both = torch.einsum("nl,hdl->hnd", piece[:, :latent], up)
            scores = some[..., :plain] @ both[..., :plain].transpose(1, 2)
            scores = (scores + some[..., plain:] @ piece[:, latent:].T).float() * scale
            if causal and first + len(piece) > context + begin + 1:
                hidden = torch.ones(end - begin, len(piece), dtype=torch.bool, device=query.device)
                scores = scores.masked_fill(hidden.triu(context + begin + 1 - first), -torch.inf)
            best = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - best), torch.exp(top - best)
            total = total * shrink + weights.sum(-1, keepdim=True)
            sums = sums * shrink + (weights.to(query.dtype) @ both[..., plain:]).float()
            top = best
        out[begin:end] = (sums / total).transpose(0, 1)
