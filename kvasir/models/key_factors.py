"""Divides keys by a factor for each channel, and multiplies queries by it, so that 8 bits are enough for keys whose
channels differ widely. Worker process.

The scores stay the same: factors are powers of two, and go into the weights once the model is loaded. That changes no
bit of theirs but those of a quantized row's scale that float16 has no room for. How large a channel's keys are is
estimated from the weights: from the gain of the keys' norm, or else from the projection, its bias, and the gain of the
norm before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvasir.layers.attention import Attention, AttentionLayer
from kvasir.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from kvasir.quantization.cpu import matrix_of

MOST = 8  # the power of two of the largest factor


def even_out_keys(attention: AttentionLayer, norm: torch.nn.Module | None) -> None:
    """Change the weights of a layer whose keys are stored in 8 bits. `norm` is the one before the projection.

    Layers with adapters keep their weights: adapters and their prompts add to keys as they were. So do layers that clip
    keys, which would clip other channels.
    """
    if type(attention) is not Attention or attention.keys_are_even:
        return
    if attention.adapters is not None or attention.clip is not None:
        return
    attention.keys_are_even = True
    if isinstance(attention.k_norm, RMSNorm | SplitRMSNorm):
        factors = _factors(attention, attention.k_norm.weight.float())
        _divide_gains(attention, factors)
        return
    factors = _factors(attention, _sizes(attention, norm))
    shared = attention.heads // attention.kv_heads
    queries = factors.view(attention.kv_heads, -1).repeat_interleave(shared, 0).flatten()
    rows = torch.cat((queries, 1 / factors))
    matrix_of(attention.qkv).multiply_rows(rows)
    if attention.qkv.bias is not None:
        attention.qkv.bias.data[: len(rows)] *= rows


def _sizes(attention: Attention, norm: torch.nn.Module | None) -> torch.Tensor:
    """The expected size of each key channel, [kv_heads * head_dim]."""
    first, count = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    weight = matrix_of(attention.qkv).rows(torch.arange(first, first + count)).float()
    constant = torch.zeros(count)
    if attention.qkv.bias is not None:
        constant += attention.qkv.bias.data[first : first + count].float()
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        constant += weight @ norm.bias.data.float()
    gain = norm.weight.data.float() if isinstance(norm, LayerNorm | RMSNorm) else torch.ones(weight.shape[1])
    return ((weight * gain).square().sum(1) + constant.square()).sqrt()


def _factors(attention: Attention, sizes: torch.Tensor) -> torch.Tensor:
    """Powers of two near the sizes, equal for channels that are rotated together. `sizes`: of one head or of all."""
    heads = sizes.square().view(-1, attention.head_dim).clone()
    for pair in _pairs(attention):
        heads[:, pair] = heads[:, pair].mean(1, keepdim=True)
    logarithm = 0.5 * torch.log2(heads.clamp_min(1e-30))
    power = torch.round(logarithm - logarithm.median(1, keepdim=True).values).clamp(-MOST, MOST)
    return torch.exp2(power).flatten()


def _pairs(attention: Attention) -> Iterable[list[int]]:
    if attention.rotary is None:
        return []
    size = attention.rotary.table.shape[1]
    if attention.rotary.rope.interleaved:
        return [[i, i + 1] for i in range(0, size, 2)]
    return [[i, i + size // 2] for i in range(size // 2)]


def _divide_gains(attention: Attention, factors: torch.Tensor) -> None:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    assert q_norm is not None and k_norm is not None, "both have norms, or neither has"
    shared = q_norm.weight.numel() // k_norm.weight.numel()  # 1 if a norm is over a head
    queries = factors.view(-1, attention.head_dim).repeat_interleave(shared, 0).flatten()
    q_norm.weight.data *= queries
    k_norm.weight.data /= factors
