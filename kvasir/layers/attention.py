"""Attention of a decoder layer: projections, norms and rotation around the chosen attention backend."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.errors import ConfigError
from kvasir.layers.adapters import SoftPrompts
from kvasir.layers.base import Build, DecoderBuild, Kinds, WeightLayer
from kvasir.layers.linear import Linear, qkv_linear, row_linear
from kvasir.layers.norm import Norm, RMSNorm, SplitRMSNorm, make_norm
from kvasir.layers.rope import rotary_for
from kvasir.layers.spec import AttentionSpec, EncoderAttentionSpec, RelativeBiasSpec
from kvasir.quantization.base import TensorKey, parameter


class AttentionLayer(nn.Module, ABC):
    """What a decoder asks of any kind of attention. `kv_cache` and `group` are set when the cache is allocated."""

    window: int | None = None  # number of last tokens that a query sees; None: all
    group = 0  # index of the group of layers with which it shares block tables
    kv_cache: torch.Tensor  # [blocks, *page_shape]
    k_scale = v_scale = 1.0  # a cache of 8-bit floats holds keys and values divided by these
    all_kv_heads = 1  # of all ranks

    @abstractmethod
    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """What one block of this rank's cache holds for the layer."""

    @abstractmethod
    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """The result for all tokens, or for `last` only; all tokens' keys and values are stored."""

    def store(self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the keys and values of these tokens without attending. Heads that draft call this."""
        raise AssertionError(f"{type(self).__name__} does not store without attending")

    def scale_heads(self, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Use a scale for each key head of all ranks. By default it is the largest, for all."""
        self.k_scale, self.v_scale = (1.0 if scale is None else float(scale.max()) for scale in (k, v))

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
        self.adapters, self.index = build.adapters, layer_number(prefix)
        self.window, self.softcap = spec.window, spec.softcap
        self.head_dim = head_dim = spec.head_dim
        self.scale = head_dim**-0.5 if spec.scale is None else spec.scale
        hidden, heads = build.hidden_size, spec.heads
        inputs = spec.input_size or hidden
        self.qkv = qkv_linear(build, f"{prefix}.qkv", inputs, heads, spec.kv_heads, head_dim, bias=spec.qkv_bias)
        self.o = row_linear(build, f"{prefix}.o", heads * head_dim, hidden, bias=spec.o_bias)
        self.heads, self.kv_heads, _ = (part.num_own // head_dim for part in self.qkv.shape.parts)
        self.all_kv_heads = spec.kv_heads
        self.qkv_scales: torch.Tensor | None = None  # scales of heads: factors of qkv, and of what attention returns
        self.seen_scales: torch.Tensor | None = None
        self.keys_are_even = False  # see models/key_factors.py
        if spec.chunk is not None and build.max_positions > spec.chunk:
            raise ConfigError(
                f"This model attends within chunks of {spec.chunk} tokens, and texts of more than one chunk are not "
                f"supported; set max_model_len to at most {spec.chunk}."
            )
        self.clip, self.temperature = spec.clip, spec.temperature
        self.sinks = Sinks(build, heads) if spec.sinks else None
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

    def scale_heads(self, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Keys and values are divided before they are stored, queries and results multiplied. A norm of heads between
        projection and cache would undo that, so such layers use the largest scale."""
        if self.q_norm is not None or self.k_norm is not None:
            super().scale_heads(k, v)
            return
        part, dim, device = self.qkv.shape.parts[1], self.head_dim, self.qkv.weight.device
        own = slice(part.own.start // dim, part.own.stop // dim)
        keys, values = (torch.ones(self.kv_heads) if one is None else one[own] for one in (k, v))
        shared = self.heads // self.kv_heads
        factors = torch.cat((keys.repeat_interleave(shared), 1 / keys, 1 / values)).repeat_interleave(dim)
        self.qkv_scales = factors.to(device)
        self.seen_scales = values.repeat_interleave(shared * dim).to(device)

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        """Everything between the two projections."""
        batch = batch.of_group(self.group)
        query = self._rotate_and_store(qkv, positions, batch.slots)
        if self.adapters is not None and self.adapters.prompts is not None:
            self._store_prompts(self.adapters.prompts, batch)
        if self.temperature is not None:
            steps = torch.floor((positions.float() + 1.0) / self.temperature.step)
            heat = 1.0 + self.temperature.scale * torch.log1p(steps)
            query = (query * heat[:, None, None]).to(query.dtype)
        if last is not None:
            query, batch = last.of(query), last.batch.of_group(self.group)
        seen = self.backend.forward(
            query,
            self.kv_cache,
            batch,
            scale=self.scale * self.k_scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.weight,
        )
        if self.v_scale != 1.0:
            seen = seen * self.v_scale
        seen = seen.view(len(query), -1)
        return seen if self.seen_scales is None else (seen * self.seen_scales).to(seen.dtype)

    def store(self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._rotate_and_store(self.qkv(x), positions, slots)

    def _rotate_and_store(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys, store keys and values in the cache, and return the queries."""
        if isinstance(self.q_norm, SplitRMSNorm):
            qkv = self._normalise_projections(qkv)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        if self.qkv_scales is not None:
            qkv = (qkv * self.qkv_scales).to(qkv.dtype)
        return kernels.rope_store(
            qkv,
            self.heads,
            positions,
            None if self.rotary is None else self.rotary.table,
            self.kv_cache,
            slots,
            self.q_norm.weight if isinstance(self.q_norm, RMSNorm) else None,
            self.k_norm.weight if isinstance(self.k_norm, RMSNorm) else None,
            self.norm_eps,
            self.rotary is not None and self.rotary.rope.interleaved,
            self.k_scale,
            self.v_scale,
        )

    def _store_prompts(self, prompts: SoftPrompts, batch: AttentionBatch) -> None:
        """Store the keys and values that an adapter brings for some tokens over those that were computed."""
        if prompts.kept is not None:
            key, value = prompts.keys[self.index], prompts.values[self.index]
            slots = batch.slots[prompts.kept]
            if self.kv_cache.dtype == torch.int8:
                key, value, bytes_of_cache = _with_scale(key), _with_scale(value), self.kv_cache.view(torch.uint8)
                place = (slots // bytes_of_cache.shape[2], slots % bytes_of_cache.shape[2])
                bytes_of_cache[:, 0].index_put_(place, key)
                bytes_of_cache[:, 1].index_put_(place, value)
                return
            kernels.store_kv(key, value, self.kv_cache, slots, self.k_scale, self.v_scale)

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
        options = norm.fused_options
        assert options is not None, "the norm can be fused"
        qkv = self.qkv.fused(stream, **options)
        return self.o.fused(self.attend(qkv, positions, batch), add=stream)


def _with_scale(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., size] as the CPU library keeps them: 8-bit integers, followed by their scale, as bytes."""
    x = vectors.float()
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    numbers = torch.where(scale > 0, x / scale, 0.0).round().to(torch.int8)
    return torch.cat((numbers.view(torch.uint8), scale.view(torch.uint8)), -1)


def layer_number(prefix: str) -> int:
    """Return the number of a layer in a path: 3 for "layers.3.attention"."""
    return next((int(word) for word in prefix.split(".") if word.isdigit()), 0)


class Sinks(WeightLayer):
    """A learned score for each head, which takes part in the softmax and has no value. Each rank has its own heads'."""

    def __init__(self, build: Build, heads: int) -> None:
        super().__init__()
        self.heads, self.own = heads, build.mesh.shard(heads, "num_attention_heads")
        self.weight = parameter((self.own.stop - self.own.start,), torch.float32, build.device)

    def tensors(self) -> dict[TensorKey, tuple[int, ...]]:
        return {("weight", None): (self.heads,)}

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor[self.own])


@ATTENTIONS.register(EncoderAttentionSpec)
class EncoderAttention(Attention):
    """Self-attention within each sequence of a step, in both directions. Sequences stand side by side without padding,
    each whole, and nothing is cached."""

    def __init__(self, build: DecoderBuild, spec: EncoderAttentionSpec, prefix: str) -> None:
        super().__init__(build, spec, prefix)
        assert spec.window is None, "an encoder's attention has a reach"
        self.reach = spec.reach
        self._bias: tuple[RelativeBias, ...] = ()  # in a tuple, so that it is not listed as each layer's own
        if spec.relative_bias is not None:
            self._bias = (relative_bias_for(build, spec.relative_bias, spec.heads),)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        raise AssertionError("an encoder has no cache")

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        if isinstance(self.q_norm, SplitRMSNorm):
            qkv = self._normalise_projections(qkv)
        heads, kv_heads = self.heads, self.kv_heads
        query, key, value = qkv.view(len(qkv), -1, self.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            rope = self.rotary.rope
            query, key = kernels.rotary(query, key, positions, self.rotary.table, rope.interleaved)
        seen = kernels.encoder_attention(
            query,
            key,
            value,
            batch.query_start,
            batch.query_lens,
            self.scale,
            self.reach,
            self._bias[0].table if self._bias else None,
            self.softcap,
        )
        seen = seen.view(len(query), -1)
        return seen if last is None else last.of(seen)


class RelativeBias(WeightLayer):
    """The bias of each head's scores by the distance from query to key; layers share one."""

    table: torch.Tensor  # [heads, 2 * max_positions - 1], in the order of key - query

    def __init__(self, build: DecoderBuild, spec: RelativeBiasSpec, heads: int) -> None:
        super().__init__()
        if build.mesh.size > 1:
            raise ConfigError("A model with relative position biases runs on one device; set tensor_parallel_size=1.")
        self.spec, self.max_positions = spec, build.max_positions
        self.weight = build.parameter(spec.num_buckets, heads)
        table = torch.empty(heads, 2 * build.max_positions - 1, dtype=build.dtype, device=build.device)
        self.register_buffer("table", table, persistent=False)

    def process(self) -> None:
        distance = torch.arange(1 - self.max_positions, self.max_positions)
        buckets = self._buckets(distance).to(self.weight.device)
        self.table.copy_(self.weight.data[buckets].T)

    def _buckets(self, distance: torch.Tensor) -> torch.Tensor:
        half = self.spec.num_buckets // 2
        exact = half // 2
        size = distance.abs()
        growth = torch.log(size.clamp(min=1).float() / exact) / math.log(self.spec.max_distance / exact)
        far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(size < exact, size, far) + half * (distance > 0)


def relative_bias_for(build: DecoderBuild, spec: RelativeBiasSpec, heads: int) -> RelativeBias:
    """Return the encoder's biases for this spec, and make them on first use."""
    if spec not in build.biases:
        build.biases[spec] = RelativeBias(build, spec, heads)
    found = build.biases[spec]
    assert isinstance(found, RelativeBias)
    return found


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
