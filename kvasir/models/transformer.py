"""The decoder: one transformer for every architecture, shaped by its DecoderSpec. Worker process.

It knows tokens, positions and the step's attention batch; no request, no file, no checkpoint name. Nothing here waits
for the device or loops over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.layers.attention import Attention
from kvasir.layers.base import Build
from kvasir.layers.embedding import Embedding, Head, TiedHead
from kvasir.layers.mlp import GatedMLP
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rotary import Rotary
from kvasir.messages import KVSpec
from kvasir.models.spec import DecoderSpec


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm; the residual is added within the next norm."""

    def __init__(self, build: Build, spec: DecoderSpec, index: int, backend: AttentionBackend, rotary: Rotary) -> None:
        super().__init__()
        prefix = f"layers.{index}"
        self.attention_norm = RMSNorm(build, spec.hidden_size, spec.norm_eps)
        self.attention = Attention(
            build,
            f"{prefix}.attention",
            backend,
            rotary,
            hidden_size=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm_eps=spec.norm_eps if spec.qk_norm else None,
            window=spec.windows[index],
        )
        self.mlp_norm = RMSNorm(build, spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(
            build, f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias
        )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self.attention(hidden, positions, batch)
        hidden, residual = self.mlp_norm.add(hidden, residual)
        return self.mlp(hidden), residual


class Transformer(nn.Module):
    """A decoder of this rank's share of the weights; `max_positions` bounds the positions it will be asked for."""

    def __init__(self, build: Build, spec: DecoderSpec, backend: AttentionBackend, max_positions: int) -> None:
        super().__init__()
        self.spec, self.vocab_size = spec, spec.vocab_size
        self.embedding = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.rotary = Rotary(build, spec.rope, max_positions)
        self.layers = nn.ModuleList(
            DecoderLayer(build, spec, index, backend, self.rotary) for index in range(spec.num_layers)
        )
        self.norm = RMSNorm(build, spec.hidden_size, spec.norm_eps)
        if spec.tie_embeddings:
            self.head: nn.Module = TiedHead(self.embedding)
        else:
            self.head = Head(build, spec.vocab_size, spec.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor,  # [tokens] int64
        positions: torch.Tensor,  # [tokens] int64
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """The hidden states after the last norm, [tokens, hidden]."""
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, batch)
        return self.norm.add(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    # ------------------------------------------------------------ the KV cache

    def page_shape(self, block_size: int) -> tuple[int, int, int, int]:
        """One block of one layer of this rank's cache: [2, block_size, kv_heads, head_dim]."""
        return 2, block_size, self._attentions()[0].kv_heads, self.spec.head_dim

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        """What this rank needs of the cache."""
        page_bytes = prod(self.page_shape(block_size)) * dtype.itemsize
        return KVSpec(num_layers=self.spec.num_layers, block_size=block_size, page_bytes=page_bytes)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, 2, block_size, kv_heads, head_dim]."""
        for attention, cache in zip(self._attentions(), caches, strict=True):
            attention.kv_cache = cache

    def _attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]
