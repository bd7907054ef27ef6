"""One layer of the decoder, in the few ways in which norms and residual are arranged. Worker process."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.layers.attention import Attention, AttentionShape
from kvasir.layers.base import Build
from kvasir.layers.mlp import MLP, GatedMLP, MoE
from kvasir.layers.norm import NoNorm, Norm, RMSNorm, make_norm
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
        if _adds_in_norms(spec):
            self.attention.o.leaves_parts = True
            if isinstance(self.mlp, GatedMLP | MLP):
                self.mlp.down.leaves_parts = True

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        if residual is None and kernels.fuses_one_row(hidden) and self.fuses:
            return self._one_row(hidden, positions, batch), None
        hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self._scaled(self.attention_post_norm(self.attention(hidden, positions, batch, last)))
        hidden, residual = self.mlp_norm.add(hidden, _kept(residual, last))
        return self._scaled(self.mlp_post_norm(self.mlp(hidden))), residual

    def _one_row(self, stream: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The same in fewer launches: norms, activation and residual within the products."""
        attention, mlp, fused = self.attention, self.mlp, kernels.fused_linear
        first, second = self.attention_norm, self.mlp_norm
        assert isinstance(mlp, GatedMLP) and isinstance(first, RMSNorm) and isinstance(second, RMSNorm)
        qkv = fused(stream, attention.qkv.weight, attention.qkv.bias, gain=first.weight, eps=first.eps)
        seen = attention.attend(qkv, positions, batch)
        stream = fused(seen, attention.o.weight, attention.o.bias, add=stream)
        active = fused(stream, mlp.gate_up.weight, mlp.gate_up.bias, gain=second.weight, eps=second.eps, gated=True)
        return fused(active, mlp.down.weight, mlp.down.bias, add=stream)

    @cached_property
    def fuses(self) -> bool:
        """Whether this layer is of the plain kind that `_one_row` knows."""
        if not (
            type(self) is DecoderLayer
            and isinstance(self.attention_norm, RMSNorm)
            and isinstance(self.attention_post_norm, NoNorm)
            and isinstance(self.mlp_norm, RMSNorm)
            and isinstance(self.mlp_post_norm, NoNorm)
            and self.residual_scale == 1.0
            and isinstance(self.mlp, GatedMLP)
            and self.mlp.activation == "silu"
        ):
            return False
        linears = self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down
        return all(linear.is_plain and kernels.is_fit(linear.weight) for linear in linears)

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


def _adds_in_norms(spec: DecoderSpec) -> bool:
    """Whether what attention and feed-forward give goes nowhere but into RMSNorm.add."""
    plain = spec.norm_place == "before" and spec.norm.startswith("rms") and spec.final_norm
    return plain and spec.residual_scale == 1.0 and not (spec.parallel or spec.shared_norm)


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
