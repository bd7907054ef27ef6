"""Attention of encoders in plain torch, for any device: the reference that the other version must equal.

Sequences of one length are attended to in one call, others one after another: on a CPU a call costs little beside the
products of a layer, and nothing is padded.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


def encoder_attention(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,
    query_start: torch.Tensor,  # [sequences + 1] int32: where each sequence begins
    query_lens: NDArray[np.int32],  # [sequences] the same as lengths, on the host
    scale: float,
    reach: int | None = None,  # tokens that one sees on either side; None: all of its sequence
    bias: torch.Tensor | None = None,  # [heads, 2 * n - 1] added to scores, in the order of key - query
    softcap: float | None = None,  # scores s become softcap * tanh(s / softcap) before any is hidden
) -> torch.Tensor:
    """[tokens, heads, head_dim]: every token attends to the tokens of its own sequence, before and after it."""
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
