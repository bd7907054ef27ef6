"""Attention over a latent cache: one short vector for each token, and one rotated key that all heads share.

Every head's keys and values are products of the vector with the head's own matrices (`latent_up`). A backend applies
those to the queries and to the result instead where that is less work; see attention/torch.py.
"""

from __future__ import annotations

import torch

from kvasir import kernels
from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.errors import ConfigError, ModelError
from kvasir.layers.attention import ATTENTIONS, AttentionLayer
from kvasir.layers.base import Build, DecoderBuild, WeightLayer
from kvasir.layers.linear import Linear, heads_part, row_linear
from kvasir.layers.mesh import Role
from kvasir.layers.norm import Norm, RMSNorm
from kvasir.layers.rope import rotary_for
from kvasir.layers.spec import LatentAttentionSpec
from kvasir.quantization.base import LinearShape, MatrixPart, TensorKey


class LatentUp(WeightLayer):
    """The matrices from a cached vector to each head's keys and values, always in the model's dtype: [heads, plain_dim
    + value_dim, latent_dim]. Each rank has its own heads'."""

    def __init__(self, build: Build, spec: LatentAttentionSpec) -> None:
        super().__init__()
        self.own = build.mesh.shard(spec.heads, "num_attention_heads")
        self.rows, self.heads = spec.plain_dim + spec.value_dim, spec.heads
        self.weight = build.parameter(self.own.stop - self.own.start, self.rows, spec.latent_dim)

    def tensors(self) -> dict[TensorKey, tuple[int, ...]]:
        return {("weight", None): (self.heads * self.rows, self.weight.shape[2])}

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor.view(self.heads, self.rows, -1)[self.own])


@ATTENTIONS.register(LatentAttentionSpec)
class LatentAttention(AttentionLayer):
    """Self-attention over cached vectors. Heads here are this rank's own; the cache is the same on every rank."""

    def __init__(self, build: DecoderBuild, spec: LatentAttentionSpec, prefix: str) -> None:
        super().__init__()
        if spec.bias and spec.query_dim is None:
            raise ModelError("config.json: attention_bias is not supported without q_lora_rank.")
        self.spec, self.backend = spec, build.backend
        self.rotary = rotary_for(build, spec.rope)
        hidden, own = build.hidden_size, build.mesh.shard(spec.heads, "num_attention_heads")
        self.heads, query_size = own.stop - own.start, spec.plain_dim + spec.rope.rotary_dim
        queries = heads_part("q", spec.heads, own, query_size)
        cached = MatrixPart("kv", spec.head_dim, slice(0, spec.head_dim))
        first = queries if spec.query_dim is None else MatrixPart("q", spec.query_dim, slice(0, spec.query_dim))
        shape = LinearShape(hidden, slice(0, hidden), (first, cached), spec.bias)
        self.down = Linear(build, f"{prefix}.down", shape, Role.COLUMN)
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if spec.query_dim is not None:
            self.query_norm = RMSNorm(build, spec.query_dim, spec.norm.eps)
            shape = LinearShape(spec.query_dim, slice(0, spec.query_dim), (queries,), False)
            self.query_up = Linear(build, f"{prefix}.query_up", shape, Role.COLUMN)
        self.latent_norm = RMSNorm(build, spec.latent_dim, spec.norm.eps)
        self.latent_up = LatentUp(build, spec)
        self.o = row_linear(build, f"{prefix}.o", spec.heads * spec.value_dim, hidden, bias=spec.bias)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """[block_size, latent_dim + rotary_dim]: the vector after its norm, and the rotated key."""
        if dtype == torch.int8:
            raise ConfigError("kv_cache_dtype='int8' is not supported for latent attention; set it to auto or fp8.")
        return block_size, self.spec.head_dim

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = self.o(self._attend(*self._project(x), positions, batch, last))
        return y

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, cached = self._split(self.down(x))
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(self.query_norm(query.contiguous()))
        return query, cached

    def _split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the first projection into queries (or the input of their projection), and vectors with their keys."""
        query, cached = both.split([part.num_own for part in self.down.shape.parts], dim=-1)
        return query, cached

    def _attend(
        self,
        query: torch.Tensor,  # [tokens, heads * (plain_dim + rotary_dim)]
        cached: torch.Tensor,  # [tokens, latent_dim + rotary_dim]
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """Compute everything between the projections."""
        spec, batch = self.spec, batch.of_group(self.group)
        query = self._rotate_and_store(query, cached, positions, batch.slots)
        if last is not None:
            query, batch = last.of(query), last.batch.of_group(self.group)
        seen = self.backend.forward_latent(
            query, self.kv_cache, self.latent_up.weight, batch, scale=spec.scale, unit=self.k_scale
        )
        return seen.reshape(len(query), -1)

    def store(self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._rotate_and_store(*self._project(x), positions, slots)

    def _rotate_and_store(
        self, query: torch.Tensor, cached: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Rotate queries and keys, store vectors and keys in the cache, and return the queries."""
        assert self.rotary is not None
        return kernels.latent_store(
            query.unflatten(-1, (self.heads, -1)),
            cached,
            positions,
            self.rotary.table,
            self.kv_cache,
            slots,
            self.latent_norm.weight,
            self.latent_norm.eps,
            self.spec.rope.interleaved,
            self.k_scale,
        )

    # ------------------------------------------------------------ fusing

    def leave_parts(self) -> None:
        self.o.leaves_parts = True

    @property
    def fuses_one_row(self) -> bool:
        parts = [self.down, self.o] if self.query_up is None else [self.down, self.query_up, self.o]
        return all(part.fuses_one_row for part in parts)

    def one_row(self, stream: torch.Tensor, norm: Norm, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        options = norm.fused_options
        assert options is not None, "the norm can be fused"
        query, cached = self._split(self.down.fused(stream, **options))
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up.fused(query, gain=self.query_norm.weight, eps=self.query_norm.eps)
        return self.o.fused(self._attend(query, cached, positions, batch), add=stream)
