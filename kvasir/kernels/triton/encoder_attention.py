"""Attention of encoders on a GPU: sequences of any length side by side, both directions, one launch per layer.

A program computes a tile of queries of one head of one sequence over all keys of the sequence, or those within reach.
Lengths are read on the device, so the launch depends only on the longest sequence and on the number of them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvasir.kernels.triton.launch import cdiv, padded_dim


@triton.jit
def _encoder_attention_kernel(
    query, key, value, out, query_start, bias,
    query_stride, key_stride, value_stride, bias_stride, bias_middle, scale, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REACH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    first = tile * QUERIES
    if first >= length:
        return
    places, dims = first + tl.arange(0, QUERIES), tl.arange(0, PADDED_DIM)
    is_query, is_dim = places < length, dims < HEAD_DIM
    at = (start + places).to(tl.int64)
    shown = is_query[:, None] & is_dim[None, :]
    own = tl.load(query + at[:, None] * query_stride + head * HEAD_DIM + dims[None, :], mask=shown, other=0.0)
    kv_head = head // GROUP
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, PADDED_DIM), tl.float32)
    begin, end = 0, length
    if REACH >= 0:
        begin = tl.maximum(first - REACH, 0) // KEYS * KEYS
        end = tl.minimum(length, first + QUERIES + REACH)
    for block in range(begin, end, KEYS):
        others = block + tl.arange(0, KEYS)
        is_key = others < length
        from_ = (start + others).to(tl.int64)
        kept = is_key[:, None] & is_dim[None, :]
        keys = tl.load(key + from_[:, None] * key_stride + kv_head * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        distance = others[None, :] - places[:, None]
        if HAS_BIAS:
            seen = is_query[:, None] & is_key[None, :]
            scores += tl.load(bias + head * bias_stride + bias_middle + distance, mask=seen, other=0.0).to(tl.float32)
        visible = is_key[None, :]
        if REACH >= 0:
            visible = visible & (distance <= REACH) & (distance >= -REACH)
        scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            value + from_[:, None] * value_stride + kv_head * HEAD_DIM + dims[None, :], mask=kept, other=0.0
        )
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    result = sums / total[:, None]
    tl.store(out + (at[:, None] * HEADS + head) * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=shown)


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: NDArray[np.int32],
    scale: float,
    reach: int | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See kernels/reference.py. Heads stand side by side within a token; tokens may be any distance apart."""
    tokens, heads, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    longest = int(query_lens.max(initial=0))
    if not tokens:
        return out
    query, key, value = (
        x if x.stride(2) == 1 and x.stride(1) == head_dim else x.contiguous() for x in (query, key, value)
    )
    queries, keys, warps, stages = _blocks(longest, head_dim, query.dtype)
    grid = (cdiv(longest, queries), heads, len(query_lens))
    _encoder_attention_kernel[grid](
        query, key, value, out, query_start, bias if bias is not None else query,
        query.stride(0), key.stride(0), value.stride(0),
        0 if bias is None else bias.stride(0), 0 if bias is None else bias.shape[1] // 2,
        scale, softcap or 1.0,
        GROUP=heads // key.shape[1], HEADS=heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim(head_dim),
        REACH=-1 if reach is None else reach, HAS_BIAS=bias is not None, HAS_CAP=softcap is not None,
        QUERIES=queries, KEYS=keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _blocks(longest: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, stages. Short texts have small tiles: most of a large one would be padding.
    Estimated, not measured."""
    if dtype == torch.float32 or head_dim > 128:
        return 32, 32, 4, 2
    if longest <= 32:
        return 32, 32, 2, 2
    return (64, 64, 4, 3) if longest <= 128 or head_dim > 64 else (128, 64, 4, 3)
