"""Attention of a decoder layer: projections, norms and rotation around the chosen attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.errors import ConfigError
from kvasir.layers.base import Build, DecoderBuild, Kinds
from kvasir.layers.linear import Linear, qkv_linear, row_linear
from kvasir.layers.norm import Norm, RMSNorm, SplitRMSNorm, make_norm
from kvasir.layers.rope import rotary_for
from kvasir.layers.spec import AttentionSpec


class AttentionLayer(nn.Module, ABC):
    """What a decoder asks of any kind of attention. `kv_cache` and `group` are set when the cache is allocated."""

    window: int | None = None  # number of last tokens that a query sees; None: all
    group = 0  # index of the group of layers with which it shares block tables
    kv_cache: torch.Tensor  # [blocks, *page_shape]
    k_scale = v_scale = 1.0  # a cache of 8-bit floats holds keys and values divided by these

    @abstractmethod
    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """What one block of this rank's cache holds for the layer."""

    @abstractmethod
    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """The result for all tokens, or for `last` only; all tokens' keys and values are stored."""

    def leave_parts(self) -> None:
        """From now on `forward` may return parts for Norm.add to sum."""
        return None

    @property
    def fuses_one_row(self) -> bool:
        """Whether `one_row` may be called; only known once the weights are loaded."""
        return False

    def one_row(self, stream: torch.Tensor, norm: Norm, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """stream + forward(norm(stream)) for one row, with norm and sum computed inside the products."""
        raise AssertionError(f"{type(self).__name__} does not fuse one row")


ATTENTIONS: Kinds[AttentionLayer] = Kinds("attention")  # built from (build, spec, prefix)


@ATTENTIONS.register(AttentionSpec)
class Attention(AttentionLayer):
    """Self-attention over cached keys and values. Heads and caches here are this rank's own."""

    def __init__(self, build: DecoderBuild, spec: AttentionSpec, prefix: str) -> None:
        super().__init__()
        self.backend, self.rotary = build.backend, rotary_for(build, spec.rope)
        self.window, self.softcap = spec.window, spec.softcap
        self.head_dim = head_dim = spec.head_dim
        self.scale = head_dim**-0.5 if spec.scale is None else spec.scale
        hidden, heads = build.hidden_size, spec.heads
        self.qkv = qkv_linear(build, f"{prefix}.qkv", hidden, heads, spec.kv_heads, head_dim, bias=spec.qkv_bias)
        self.o = row_linear(build, f"{prefix}.o", heads * head_dim, hidden, bias=spec.o_bias)
        self.heads, self.kv_heads, _ = (part.num_own // head_dim for part in self.qkv.shape.parts)
        self.norm_eps = 0.0 if spec.qk_norm is None else spec.qk_norm.eps
        self.q_norm: RMSNorm | SplitRMSNorm | None = None
        self.k_norm: RMSNorm | SplitRMSNorm | None = None
        if spec.qk_norm is not None:
            make = _projection_norms if spec.qk_norm_over == "projection" else _head_norms
            self.q_norm, self.k_norm = make(build, self.qkv, spec)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """[2, block_size, kv_heads, head_dim]; a head's 8-bit integers are followed by their scale, a float32."""
        return 2, block_size, self.kv_heads, self.head_dim + (4 if dtype == torch.int8 else 0)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = self.o(self.attend(self.qkv(x), positions, batch, last))
        return y

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """Everything between the two projections."""
        batch = batch.of_group(self.group)
        if isinstance(self.q_norm, SplitRMSNorm):
            qkv = self._normalise_projections(qkv)
        query = kernels.rope_store(
            qkv,
            self.heads,
            positions,
            None if self.rotary is None else self.rotary.table,
            self.kv_cache,
            batch.slots,
            self.q_norm.weight if isinstance(self.q_norm, RMSNorm) else None,
            self.k_norm.weight if isinstance(self.k_norm, RMSNorm) else None,
            self.norm_eps,
            self.rotary is not None and self.rotary.rope.interleaved,
            self.k_scale,
            self.v_scale,
        )
        if last is not None:
            query, batch = last.of(query), last.batch.of_group(self.group)
        seen = self.backend.forward(
            query, self.kv_cache, batch, scale=self.scale * self.k_scale, window=self.window, softcap=self.softcap
        )
        if self.v_scale != 1.0:
            seen = seen * self.v_scale
        return seen.view(len(query), -1)

    def _normalise_projections(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None and self.k_norm is not None, "queries and keys have norms"
        q, k, v = qkv.split([part.num_own for part in self.qkv.shape.parts], dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)

    # ------------------------------------------------------------ fusing

    def leave_parts(self) -> None:
        self.o.leaves_parts = True

    @property
    def fuses_one_row(self) -> bool:
        return self.qkv.fuses_one_row and self.o.fuses_one_row

    def one_row(self, stream: torch.Tensor, norm: Norm, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        fused, options = kernels.fused_linear, norm.fused_options
        assert options is not None, "the norm can be fused"
        qkv = fused(stream, self.qkv.weight, self.qkv.bias, **options)
        return fused(self.attend(qkv, positions, batch), self.o.weight, self.o.bias, add=stream)


def _head_norms(build: Build, qkv: Linear, spec: AttentionSpec) -> tuple[RMSNorm, RMSNorm]:
    q, k = make_norm(build, spec.qk_norm, spec.head_dim), make_norm(build, spec.qk_norm, spec.head_dim)
    assert isinstance(q, RMSNorm) and isinstance(k, RMSNorm), "kernels.rope_store computes RMS norms"
    return q, k


def _projection_norms(build: Build, qkv: Linear, spec: AttentionSpec) -> tuple[SplitRMSNorm, SplitRMSNorm]:
    if build.mesh.size > spec.kv_heads:
        raise ConfigError(
            f"This model normalises all key heads as one vector, so its {spec.kv_heads} key heads cannot be split over "
            f"{build.mesh.size} ranks; choose a tensor_parallel_size of at most {spec.kv_heads}."
        )
    assert spec.qk_norm is not None, "the spec has a norm of queries and keys"
    q, k, _ = qkv.shape.parts
    eps = spec.qk_norm.eps
    return SplitRMSNorm(build, q.outputs, q.own, eps), SplitRMSNorm(build, k.outputs, k.own, eps)
