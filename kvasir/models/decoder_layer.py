"""Decoder layers: attention and feed-forward around a residual, in the arrangements that models use. Worker process.

A layer registers for the class of its spec (LAYERS) and asks its parts what may be fused; it knows no kind of them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.layers.attention import ATTENTIONS
from kvasir.layers.base import DecoderBuild, Kinds
from kvasir.layers.mlp import FEED_FORWARDS
from kvasir.layers.norm import Norm, make_norm
from kvasir.models.spec import LayerSpec, ParallelLayerSpec, PostNormLayerSpec

States = tuple[torch.Tensor, torch.Tensor | None]  # what the last layer adds, and the residual it is added to

LAYERS: Kinds[DecoderLayer] = Kinds("decoder layer")  # built from (build, spec, prefix)


@LAYERS.register(LayerSpec)
class DecoderLayer(nn.Module):
    """Attention, then feed-forward. The next layer's first norm adds this layer's result to the residual. Given `last`,
    only those tokens leave the layer, but the keys and values of all are stored."""

    is_sequential = True  # feed-forward reads what attention has added to the residual

    def __init__(self, build: DecoderBuild, spec: LayerSpec, prefix: str) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = make_norm(build, spec.attention_norm, build.hidden_size)
        self.attention = ATTENTIONS.make(build, spec.attention, f"{prefix}.attention")
        self.attention_post_norm = make_norm(build, spec.attention_post_norm, build.hidden_size)
        self.mlp_norm = make_norm(build, spec.mlp_norm, build.hidden_size)
        self.mlp = FEED_FORWARDS.make(build, spec.mlp, f"{prefix}.mlp")
        self.mlp_post_norm = make_norm(build, spec.mlp_post_norm, build.hidden_size)
        self.residual_scale = spec.residual_scale

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

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    # ------------------------------------------------------------ fusing

    def _one_row(self, stream: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The layer in fewer launches: norms, activation and residual inside the products."""
        stream = self.attention.one_row(stream, self.attention_norm, positions, batch)
        return self.mlp.one_row(stream, self.mlp_norm)

    @cached_property
    def fuses(self) -> bool:
        """Whether `_one_row` computes this layer; asked once the weights are loaded."""
        norms_fuse = self.attention_norm.fused_options is not None and self.mlp_norm.fused_options is not None
        return norms_fuse and self._adds_directly and self.attention.fuses_one_row and self.mlp.fuses_one_row

    @property
    def _adds_directly(self) -> bool:
        """Whether results of attention and feed-forward are added to the residual as they are."""
        bare = self.attention_post_norm.is_identity and self.mlp_post_norm.is_identity
        return self.is_sequential and bare and self.residual_scale == 1.0

    def leave_parts(self, following: Norm) -> None:
        """Leave sums of parts to the norms that come next; `following` is the norm after this layer."""
        if not self._adds_directly:
            return
        if self.mlp_norm.sums_parts:
            self.attention.leave_parts()
        if following.sums_parts:
            self.mlp.leave_parts()


@LAYERS.register(ParallelLayerSpec)
class ParallelLayer(DecoderLayer):
    """Attention and feed-forward read the same residual, through a norm each or one for both."""

    is_sequential = False

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        normed, residual = self.attention_norm.add(hidden, residual)
        other = normed if self.mlp_norm.is_identity else self.mlp_norm(residual)
        other, residual = _kept(other, last), _kept(residual, last)
        return self.attention(normed, positions, batch, last) + self.mlp(other), residual


@LAYERS.register(PostNormLayerSpec)
class PostNormLayer(DecoderLayer):
    """Norms follow the sums with the residual, and their results are the next residual."""

    is_sequential = False

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
