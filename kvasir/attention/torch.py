"""Paged attention in plain torch, for any device: the reference the other backends and the kernels must equal.

Nothing here waits for the device: shapes come from the batch's host arrays, true lengths only enter as masks. Decodes
of like length are gathered into one padded batch; the heads that share a key head stand as its query rows, so keys and
values are never repeated. Chunks are attended one by one.

Over a latent cache, a decode applies each head's matrices to the query and to the result, and reads the cached vectors
as they are: one key and value for all heads. A chunk has many queries for each cached token, so keys and values are
computed from the vectors, some tokens at a time, and the results are merged by the sums of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from kvasir.attention.base import AttentionBatch

# A group of decodes gathers at most this much of K or of V (one long sequence may need more), and a mask is at most
# this large: on a CPU a group stays in the last-level cache, on a GPU fewer launches matter more.
_GROUP_BYTES = {"cpu": 8 << 20}
_GROUP_BYTES_ELSEWHERE = 128 << 20
# Rows shorter than this share of a group's longest go to the next group; padding wastes at most the rest.
_LIKE_LENGTH = {"cpu": 0.75}
_LIKE_LENGTH_ELSEWHERE = 0.5
PIECE = 4096  # tokens of a latent context whose keys and values are computed at once
MOST_SCORES = 1 << 24  # that a chunk over a latent cache computes at once


class TorchAttention:
    """See AttentionBackend."""

    capturable = False

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in _decode_groups(batch, kv_cache):
            _attend_decodes(out, query, kv_cache, group, scale, window, softcap, sinks)
        start = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            end = start + int(batch.query_lens[row])
            keys, values = _gather_row(kv_cache, batch, row, query.dtype)
            _attend_chunk(out[start:end], query[start:end], keys, values, scale, window, softcap, sinks, batch.causal)
            start = end
        return out

    def forward_latent(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        up: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        unit: float = 1.0,
    ) -> torch.Tensor:
        return attend_latent(query, kv_cache, up, batch, scale, unit)


# ---------------------------------------------------------------- decodes


@dataclass(slots=True)
class DecodeGroup:
    rows: torch.Tensor | None  # [n] int64, which decodes; None: all of them, in order
    pages: torch.Tensor  # [n * num_blocks] int32, their blocks
    seq_lens: torch.Tensor  # [n] int32
    num_keys: int  # per row, padding included
    seen: dict[tuple[int | None, torch.dtype], _Seen] = field(default_factory=dict)

    def what_is_seen(self, window: int | None, dtype: torch.dtype) -> _Seen:
        if (window, dtype) not in self.seen:
            position = torch.arange(self.num_keys, device=self.seq_lens.device)
            end = self.seq_lens[:, None]
            hidden = position >= end
            if window is not None:
                hidden |= position < end - window
            self.seen[window, dtype] = _Seen(hidden, dtype)
        return self.seen[window, dtype]


class _Seen:
    """The gathered keys that each row sees: none past its end or before its window."""

    def __init__(self, hidden: torch.Tensor, dtype: torch.dtype) -> None:  # [n, keys]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        self.mask = mask[:, None, None]  # [n, 1, 1, keys]
        self._hidden = hidden[:, :, None, None]
        # On a CPU the few hidden keys are listed, which is cheaper than a mask; a GPU would have to wait for the list.
        self._slots = hidden.flatten().nonzero().flatten() if hidden.device.type == "cpu" else None

    def clear(self, gathered: torch.Tensor) -> None:  # [n, keys, kv_heads, head_dim]
        """Overwrite hidden keys with zeros: they may be of another request, and a weight of 0 does not undo a NaN."""
        if self._slots is None:
            gathered.masked_fill_(self._hidden, 0)
        elif len(self._slots):
            gathered.flatten(0, 1).index_fill_(0, self._slots, 0)


def _decode_groups(batch: AttentionBatch, kv_cache: torch.Tensor) -> list[DecodeGroup]:
    """Groups of decodes of similar length, longest first; computed once per step."""
    _, _, block_size, kv_heads, head_dim = kv_cache.shape
    page_bytes = block_size * kv_heads * head_dim * kv_cache.element_size()
    note = ("torch decodes", page_bytes)
    if note not in batch.step_cache:
        batch.step_cache[note] = group_decodes(batch, page_bytes) if batch.num_decodes else []
    groups: list[DecodeGroup] = batch.step_cache[note]
    return groups


def group_decodes(batch: AttentionBatch, page_bytes: int) -> list[DecodeGroup]:
    tables, lens = batch.block_tables()[: batch.num_decodes], batch.seq_lens[: batch.num_decodes]
    blocks = -(-batch.seq_bounds[: batch.num_decodes] // batch.block_size)
    order = np.argsort(-blocks, kind="stable")
    cuts = list(_cut(blocks[order], page_bytes, tables.device.type))
    if len(cuts) == 1:
        width = int(blocks.max())
        return [DecodeGroup(None, tables[:, :width].reshape(-1), lens, width * batch.block_size)]
    rows = torch.from_numpy(order)
    # Only a copy from pinned memory is sure not to wait for the device.
    rows = rows.pin_memory().to(tables.device, non_blocking=True) if tables.is_cuda else rows.to(tables.device)
    groups = []
    for begin, end in cuts:
        width, some = int(blocks[order[begin]]), rows[begin:end]
        pages = tables[:, :width].index_select(0, some).reshape(-1)
        groups.append(DecodeGroup(some, pages, lens.index_select(0, some), width * batch.block_size))
    return groups


def _cut(blocks: np.ndarray, page_bytes: int, device: str) -> Iterator[tuple[int, int]]:
    """Ranges of a descending array of block counts that are similar and together small enough to gather."""
    like, most = _LIKE_LENGTH.get(device, _LIKE_LENGTH_ELSEWHERE), _GROUP_BYTES.get(device, _GROUP_BYTES_ELSEWHERE)
    begin = 0
    while begin < len(blocks):
        longest = int(blocks[begin])
        alike = int(np.searchsorted(-blocks, -int(like * longest), side="right"))
        end = min(alike, begin + max(1, most // (longest * page_bytes)))
        yield begin, end
        begin = end


def _attend_decodes(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    n, (_, heads, head_dim), kv_heads = len(group.seq_lens), query.shape, kv_cache.shape[3]
    keys, values = _gather(kv_cache, group.pages, n, query.dtype)
    query = query[:n] if group.rows is None else query.index_select(0, group.rows)
    query = query.reshape(n, kv_heads, heads // kv_heads, head_dim)
    visible = group.what_is_seen(window, query.dtype)
    for gathered in (keys, values):
        visible.clear(gathered)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    ends = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1)
    seen = _attend(query, keys, values, visible.mask, scale, softcap, ends).reshape(n, heads, head_dim)
    if group.rows is None:
        out[:n] = seen
    else:
        out.index_copy_(0, group.rows, seen)


def _gather(
    kv_cache: torch.Tensor, pages: torch.Tensor, n: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of n rows' blocks, each [n, keys, kv_heads, head_dim]."""
    shape = (n, -1, *kv_cache.shape[3:])
    if kv_cache.itemsize == 1:  # torch gathers bytes anywhere, 8-bit floats only on some devices
        stored = kv_cache.view(torch.uint8)
        keys, values = (stored[:, i].index_select(0, pages).view(kv_cache.dtype).to(dtype) for i in (0, 1))
    else:
        keys, values = kv_cache[:, 0].index_select(0, pages), kv_cache[:, 1].index_select(0, pages)
    return keys.view(shape), values.view(shape)


# ---------------------------------------------------------------- chunks


def _gather_row(
    kv_cache: torch.Tensor, batch: AttentionBatch, row: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of one row, each [keys, kv_heads, head_dim]. On a CPU the length is at hand; elsewhere there
    are no drafts, and a chunk's bound is its true length (`config/resolve.py` sees to it)."""
    length = int(batch.seq_lens[row] if batch.seq_lens.device.type == "cpu" else batch.seq_bounds[row])
    pages = batch.block_tables()[row, : -(-length // batch.block_size)]
    keys, values = _gather(kv_cache, pages, 1, dtype)
    return keys[0, :length], values[0, :length]


def _attend_chunk(
    out: torch.Tensor,  # [queries, heads, head_dim]
    query: torch.Tensor,
    keys: torch.Tensor,  # [keys, kv_heads, head_dim]; the queries are the last of them
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
) -> None:
    """Attend in pieces of queries, each over the keys it may see, so that no mask grows too large."""
    context = len(keys) - len(query)
    masked = window is not None and window < len(keys)
    if not masked and softcap is None and sinks is None and (context == 0 or not causal):
        _attend_piece(out, query, keys, values, scale, None, None, None, is_causal=causal)
        return
    most = _GROUP_BYTES.get(query.device.type, _GROUP_BYTES_ELSEWHERE)
    step = max(16, most // (len(keys) * query.element_size()))
    for begin in range(0, len(query), step):
        end = min(begin + step, len(query))
        first = max(0, context + begin + 1 - window) if window is not None else 0
        last = context + end if causal else len(keys)
        shift = context + begin - first  # where the piece's first query stands among the piece's keys
        mask = _chunk_mask(end - begin, last - first, shift, window if masked else None, causal, query)
        seen = keys[first:last], values[first:last]
        _attend_piece(out[begin:end], query[begin:end], *seen, scale, mask, softcap, sinks)


def _chunk_mask(
    queries: int, keys: int, shift: int, window: int | None, causal: bool, like: torch.Tensor
) -> torch.Tensor:
    """[queries, keys]: -inf where the key comes after query + shift, or `window` and more before it."""
    mask = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
    hidden = torch.full_like(mask, -torch.inf)
    if causal:
        mask += hidden.triu(shift + 1)
    if window is not None:
        mask += hidden.tril(shift - window)
    return mask


def _attend_piece(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_causal: bool = False,
) -> None:
    # Key heads are the batch; their query heads see one key head expanded without a copy. Every kernel behind
    # scaled_dot_product_attention takes such strides (the memory-efficient one of torch 2.11 not always: see below),
    # while few take enable_gqa together with a mask.
    (queries, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    shared = heads // kv_heads
    query = query.reshape(queries, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    if query.is_cuda and queries % 32 == 1:  # alone in its tile, the last query is wrong if keys have such strides
        keys, values = keys.contiguous(), values.contiguous()
    ends = None if sinks is None else sinks.view(kv_heads, shared, 1, 1)
    seen = _attend(query, keys, values, mask, scale, softcap, ends, is_causal)
    out.view(queries, kv_heads, shared, head_dim).copy_(seen.permute(2, 0, 1, 3))


def _attend(
    query: torch.Tensor,  # [..., queries, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,  # [..., queries, 1], or what expands to it
    is_causal: bool = False,
) -> torch.Tensor:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
    assert mask is not None and not is_causal, "with a soft cap or sinks what is hidden stands in the mask"
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return weights[..., : keys.shape[-2]].to(query.dtype) @ values


# ---------------------------------------------------------------- a latent cache


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
            _attend_latent_decodes(out, query, cache, up, group, plain, scale, unit)
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(batch.query_lens)):
        end = start + int(batch.query_lens[row])
        # On a CPU the length is at hand; elsewhere there are no drafts, and a chunk's bound is its true length.
        length = int(batch.seq_lens[row] if batch.seq_lens.device.type == "cpu" else batch.seq_bounds[row])
        pages = batch.block_tables()[row, : -(-length // batch.block_size)]
        seen = _gather_vectors(cache, pages, 1, query.dtype, unit)[0, :length]
        _attend_latent_chunk(out[start:end], query[start:end], seen, up, plain, scale, batch.causal)
        start = end
    return out


def _groups(batch: AttentionBatch, cache: torch.Tensor) -> list[DecodeGroup]:
    note = ("latent decodes", cache.shape[2])
    if note not in batch.step_cache:
        page_bytes = cache.shape[1] * cache.shape[2] * cache.element_size()
        batch.step_cache[note] = group_decodes(batch, page_bytes)
    groups: list[DecodeGroup] = batch.step_cache[note]
    return groups


def _gather_vectors(cache: torch.Tensor, pages: torch.Tensor, n: int, dtype: torch.dtype, unit: float) -> torch.Tensor:
    """Return the cached vectors of n rows, [n, keys, width]."""
    if cache.itemsize == 1:  # torch gathers bytes anywhere, 8-bit floats only on some devices
        found = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).to(dtype)
    else:
        found = cache.index_select(0, pages)
    found = found.view(n, -1, cache.shape[2])
    return found if unit == 1.0 else found * unit


def _attend_latent_decodes(
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
    seen = _gather_vectors(cache, group.pages, n, query.dtype, unit)
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


def _attend_latent_chunk(
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
