"""Self-attention of a decoder layer: projections, norms and rotation around the chosen attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.errors import ConfigError
from kvasir.layers.base import Build
from kvasir.layers.linear import Linear, qkv_linear, row_linear
from kvasir.layers.norm import RMSNorm, SplitRMSNorm, make_norm
from kvasir.layers.rotary import Rotary


@dataclass(frozen=True)
class AttentionShape:
    """The sizes and options of one layer's attention; heads are those of the whole model."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # how many last tokens it sees; None: all
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None  # "head": each head is normalised; "whole": all of a projection; None: neither
    norm: str = "rms"  # kind of those norms
    norm_eps: float = 0.0


class Attention(nn.Module):
    """Heads and caches here are this rank's own. `kv_cache` and `group` are set when the cache has been allocated."""

    group = 0  # of layers that share block tables
    kv_cache: torch.Tensor  # [blocks, 2, block_size, kv_heads, head_dim]
    k_scale = v_scale = 1.0  # a cache of 8-bit floats holds keys and values divided by these

    def __init__(
        self, build: Build, prefix: str, backend: AttentionBackend, rotary: Rotary | None, shape: AttentionShape
    ) -> None:
        super().__init__()
        self.backend, self.rotary, self.window, self.softcap = backend, rotary, shape.window, shape.softcap
        self.head_dim = head_dim = shape.head_dim
        self.scale = head_dim**-0.5 if shape.scale is None else shape.scale
        hidden, heads = shape.hidden_size, shape.heads
        self.qkv = qkv_linear(build, f"{prefix}.qkv", hidden, heads, shape.kv_heads, head_dim, bias=shape.qkv_bias)
        self.o = row_linear(build, f"{prefix}.o", heads * head_dim, hidden, bias=shape.o_bias)
        self.heads, self.kv_heads, _ = (part.num_own // head_dim for part in self.qkv.shape.parts)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.norm_eps = shape.norm_eps
        if shape.qk_norm == "head":
            self.q_norm = make_norm(build, shape.norm, head_dim, shape.norm_eps)
            self.k_norm = make_norm(build, shape.norm, head_dim, shape.norm_eps)
        elif shape.qk_norm == "whole":
            self.q_norm, self.k_norm = _whole_norms(build, self.qkv, shape)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """Of all tokens, or of `last` alone, though every token's keys and values are stored."""
        y: torch.Tensor = self.o(self.attend(self.qkv(x), positions, batch, last))
        return y

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """What stands between the two projections."""
        batch = batch.of_group(self.group)
        if isinstance(self.q_norm, SplitRMSNorm):
            qkv = self._normalise_whole(qkv)
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

    def _normalise_whole(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q, k, v = qkv.split([part.num_own for part in self.qkv.shape.parts], dim=-1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)


def _whole_norms(build: Build, qkv: Linear, shape: AttentionShape) -> tuple[SplitRMSNorm, SplitRMSNorm]:
    if build.mesh.size > shape.kv_heads:
        raise ConfigError(
            f"This model normalises all key heads as one, so its {shape.kv_heads} key heads cannot be dealt to "
            f"{build.mesh.size} ranks; choose a tensor_parallel_size of at most {shape.kv_heads}."
        )
    q, k, _ = qkv.shape.parts
    return (
        SplitRMSNorm(build, q.outputs, q.own, shape.norm_eps),
        SplitRMSNorm(build, k.outputs, k.own, shape.norm_eps),
    )
