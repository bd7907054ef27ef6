"""One layer of the decoder, in the few ways in which norms and residual are arranged. Worker process."""

from __future__ import annotations

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.layers.attention import Attention, AttentionShape
from kvasir.layers.base import Build
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.moe import MoE
from kvasir.layers.norm import NoNorm, Norm, make_norm
from kvasir.layers.rotary import Rotary
from kvasir.models.spec import DecoderSpec

States = tuple[torch.Tensor, torch.Tensor | None]  # what the last layer adds, and the residual it is added to


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, before one, or both; the residual is added within the next
    layer's first norm. Given `last`, only those tokens leave the layer; all leave keys and values behind."""

    def __init__(
        self, build: Build, spec: DecoderSpec, index: int, backend: AttentionBackend, rotary: Rotary | None
    ) -> None:
        super().__init__()
        prefix = f"layers.{index}"
        before, after = spec.norm_place in ("before", "around"), spec.norm_place in ("after", "around", "sum")
        self.attention_norm = _norm(build, spec, before)
        self.attention = Attention(build, f"{prefix}.attention", backend, rotary, _attention_shape(spec, index))
        self.attention_post_norm = _norm(build, spec, after)
        self.mlp_norm = _norm(build, spec, before and not spec.shared_norm)
        self.mlp = _make_mlp(build, spec, index, f"{prefix}.mlp")
        self.mlp_post_norm = _norm(build, spec, after)
        self.residual_scale = spec.residual_scale

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self._scaled(self.attention_post_norm(self.attention(hidden, positions, batch, last)))
        hidden, residual = self.mlp_norm.add(hidden, _kept(residual, last))
        return self._scaled(self.mlp_post_norm(self.mlp(hidden))), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward read the same residual, through a norm each or one for both."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        normed, residual = self.attention_norm.add(hidden, residual)
        other = normed if isinstance(self.mlp_norm, NoNorm) else self.mlp_norm(residual)
        other, residual = _kept(other, last), _kept(residual, last)
        return self.attention(normed, positions, batch, last) + self.mlp(other), residual


class SumNormLayer(DecoderLayer):
    """The norm is over the sum with the residual, and what it gives is the next residual, as in the first
    transformers."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        attended = self.attention(hidden, positions, batch, last)
        hidden = self.attention_post_norm(_kept(hidden, last) + attended)
        return self.mlp_post_norm(hidden + self.mlp(hidden)), None


def _kept(x: torch.Tensor, last: LastTokens | None) -> torch.Tensor:
    return x if last is None else last.of(x)


def make_layer(
    build: Build, spec: DecoderSpec, index: int, backend: AttentionBackend, rotary: Rotary | None
) -> DecoderLayer:
    kind = ParallelLayer if spec.parallel else SumNormLayer if spec.norm_place == "sum" else DecoderLayer
    return kind(build, spec, index, backend, rotary)


def _norm(build: Build, spec: DecoderSpec, there: bool) -> Norm:
    return make_norm(build, spec.norm, spec.hidden_size, spec.norm_eps) if there else NoNorm()


def _attention_shape(spec: DecoderSpec, index: int) -> AttentionShape:
    return AttentionShape(
        hidden_size=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.windows[index],
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        qkv_bias=spec.qkv_bias,
        o_bias=spec.o_bias,
        qk_norm=spec.qk_norm,
        norm=spec.norm,
        norm_eps=spec.norm_eps,
    )


def _make_mlp(build: Build, spec: DecoderSpec, index: int, prefix: str) -> nn.Module:
    moe = spec.moe
    if moe is not None and moe.layers[index]:
        return MoE(
            build,
            prefix,
            spec.hidden_size,
            moe.intermediate_size,
            spec.activation,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            normalise=moe.normalise,
            shared_size=moe.shared_size,
        )
    kind = GatedMLP if spec.gated else MLP
    return kind(build, prefix, spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)
