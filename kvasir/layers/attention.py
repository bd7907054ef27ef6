"""Self-attention of a decoder layer: projections, norms and rotation around the chosen attention backend."""

from __future__ import annotations

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.layers.base import Build
from kvasir.layers.linear import qkv_linear, row_linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rotary import Rotary


class Attention(nn.Module):
    """Heads and caches here are this rank's own. `kv_cache` is set when the cache has been allocated."""

    kv_cache: torch.Tensor  # [blocks, 2, block_size, kv_heads, head_dim]

    def __init__(
        self,
        build: Build,
        prefix: str,
        backend: AttentionBackend,
        rotary: Rotary,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,  # None: queries and keys are not normalised
        window: int | None,
    ) -> None:
        super().__init__()
        self.backend, self.rotary, self.window = backend, rotary, window
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.qkv = qkv_linear(build, f"{prefix}.qkv", hidden_size, heads, kv_heads, head_dim, bias=qkv_bias)
        self.o = row_linear(build, f"{prefix}.o", heads * head_dim, hidden_size, bias=o_bias)
        self.heads, self.kv_heads, _ = (part.num_own // head_dim for part in self.qkv.shape.parts)
        self.q_norm = self.k_norm = None
        self.norm_eps = qk_norm_eps or 0.0
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(build, head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(build, head_dim, qk_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        query = kernels.rope_store(
            self.qkv(x),
            self.heads,
            positions,
            self.rotary.table,
            self.kv_cache,
            batch.slots,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.norm_eps,
        )
        seen = self.backend.forward(query, self.kv_cache, batch, scale=self.scale, window=self.window)
        y: torch.Tensor = self.o(seen.view(len(x), -1))
        return y
