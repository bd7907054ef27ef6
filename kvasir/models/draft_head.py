"""Heads that draft on top of a model, from the model's own hidden states: EAGLE's, MTP's and Medusa's. Worker process.

EAGLE and MTP are one decoder layer: EAGLE-3 reads the states of three layers, EAGLE-1 and MTP the last ones. Position p
of such a head stands for the token p + 1 and the model's states at p, from which it predicts the token p + 2. Where the
model's states are not known yet, the head's own take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from kvasir.attention.base import AttentionBackend, AttentionBatch
from kvasir.layers.attention import ATTENTIONS
from kvasir.layers.base import Build, DecoderBuild, WeightLayer, weight_bytes
from kvasir.layers.embedding import Embedding, Head
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mlp import FEED_FORWARDS
from kvasir.layers.norm import make_norm
from kvasir.layers.spec import NormSpec
from kvasir.messages import KVSpec
from kvasir.models.spec import LayerSpec
from kvasir.models.transformer import Transformer
from kvasir.quantization.base import parameter


@dataclass(frozen=True)
class DraftHeadSpec:
    """The parts of a head. Sizes are those of the head, unless said otherwise."""

    layer: LayerSpec  # its attention_norm reads the result of `joins`, or where nothing joins, the token's embedding
    hidden_size: int
    features: tuple[int, ...]  # layers of the model whose entering states are read; the number of layers: the last ones
    feature_size: int  # of the model's states
    vocab_size: int  # that it drafts from
    joins: bool  # embedding and states are projected to one vector; if not, they stand side by side
    join_bias: bool = False
    embedding_norm: NormSpec | None = None  # these two are of what joins
    state_norm: NormSpec | None = None
    projects_features: bool = False  # states of several layers, or of another size, are projected to one vector
    each_feature_norm: NormSpec | None = None  # of each layer's states before that
    all_features_norm: NormSpec | None = None  # of all of them as one vector
    residual_is_normed: bool = False  # EAGLE-3: the residual begins after the norm of the states
    final_norm: NormSpec | None = None
    passes_normed: bool = False  # the next draft is computed from states after the final norm
    has_embedding: bool = False  # of its own; if not, the model's is used
    has_head: bool = False  # the same
    has_offsets: bool = False  # its vocabulary is a part of the model's


class DraftVocabulary(WeightLayer):
    """Maps the head's tokens to the model's, by a table whose entries EAGLE-3 counts from the head's own numbers."""

    takes_integers = True

    def __init__(self, build: Build, size: int, *, counts_from_own: bool = True) -> None:
        super().__init__()
        self.size, self.counts_from_own = size, counts_from_own
        self.weight = parameter((size,), torch.int64, build.device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.weight[tokens] if self.counts_from_own else self.weight[tokens]


class DraftLayer(nn.Module):
    """The one layer of a head: norms, attention and the feed-forward network."""

    def __init__(self, build: DecoderBuild, spec: LayerSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(build, spec.attention_norm, build.hidden_size)
        self.attention = ATTENTIONS.make(build, spec.attention, "layer.attention")
        self.mlp_norm = make_norm(build, spec.mlp_norm, build.hidden_size)
        self.mlp = FEED_FORWARDS.make(build, spec.mlp, "layer.mlp")


class DraftHead(nn.Module):
    """Drafts the next token from a token and states. `target` gives what the checkpoint of the head lacks."""

    def __init__(
        self, build: Build, spec: DraftHeadSpec, backend: AttentionBackend, max_positions: int, target: Transformer
    ) -> None:
        super().__init__()
        self.spec, self.backend, self.dtype = spec, backend, build.dtype
        self._target = (target,)  # in a tuple, so that its parameters are not listed as this module's
        size, features = spec.hidden_size, len(spec.features) * spec.feature_size
        self.each_norm = nn.ModuleList(
            make_norm(build, spec.each_feature_norm, spec.feature_size) for _ in spec.features if spec.each_feature_norm
        )
        self.all_norm = make_norm(build, spec.all_features_norm, features)
        self.project: nn.Module = nn.Identity()
        if spec.projects_features:
            self.project = replicated_linear(build, "project", features, size, bias=False)
        self.embedding: Embedding | None = None
        if spec.has_embedding:
            self.embedding = Embedding(build, target.vocab_size, size)
        self.embedding_norm = make_norm(build, spec.embedding_norm, size)
        self.state_norm = make_norm(build, spec.state_norm, size)
        self.join: nn.Module = nn.Identity()
        if spec.joins:
            self.join = replicated_linear(build, "join", 2 * size, size, bias=spec.join_bias)
        parts = DecoderBuild(**vars(build), hidden_size=size, backend=backend, max_positions=max_positions)
        self.layer = DraftLayer(parts, spec.layer)
        self.rotaries = nn.ModuleList(parts.rotaries.values())
        self.norm = make_norm(build, spec.final_norm, size)
        self.head = Head(build, spec.vocab_size, size) if spec.has_head else None
        self.offsets = DraftVocabulary(build, spec.vocab_size) if spec.has_offsets else None

    # ------------------------------------------------------------ a step

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the model's states of `spec.features`, side by side, as the head reads them: [tokens, hidden]."""
        if len(self.each_norm):
            parts = states.chunk(len(self.each_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.each_norm, parts, strict=True)], dim=-1)
        combined: torch.Tensor = self.project(self.all_norm(states))
        return combined

    def store(self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the keys and values of tokens and states that are known; a single layer needs no more of them."""
        self.layer.attention.store(self._enter(ids, states)[0], positions, slots)

    def forward(
        self,
        ids: torch.Tensor,  # [rows] int64
        states: torch.Tensor,  # [rows, hidden]
        positions: torch.Tensor,  # [rows] int64
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafted tokens [rows] int64, and the states from which the next ones are drafted. They may take the
        memory of `states`."""
        layer = self.layer
        hidden, residual = self._enter(ids, states)
        hidden, residual = layer.mlp_norm.add(layer.attention(hidden, positions, batch), residual)
        normed, stream = self.norm.add(layer.mlp(hidden), residual)
        if self.head is None:
            tokens = self._target[0].logits(normed).argmax(dim=-1)
        else:
            tokens = self.head(normed).argmax(dim=-1)
        if self.offsets is not None:
            tokens = self.offsets(tokens)
        return tokens, normed if self.spec.passes_normed else stream

    def _enter(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of attention, and the residual."""
        embedding = self._target[0].embedding if self.embedding is None else self.embedding
        embedded, layer = embedding(ids), self.layer
        if self.spec.joins:
            pair = torch.cat((self.embedding_norm(embedded), self.state_norm(states)), dim=-1)
            joined: torch.Tensor = self.join(pair)
            return layer.attention_norm(joined), joined
        normed = self.state_norm(states)
        residual = normed if self.spec.residual_is_normed else states
        return torch.cat((layer.attention_norm(embedded), normed), dim=-1), residual

    # ------------------------------------------------------------ what the worker asks

    @property
    def capturable(self) -> bool:
        return self.backend.capturable

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        return KVSpec(1, block_size, prod(self.page_shape(block_size, dtype)) * dtype.itemsize)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        return self.layer.attention.page_shape(block_size, dtype)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        (self.layer.attention.kv_cache,) = caches

    def compile_key(self) -> str:
        return f"{self.spec} {type(self.backend).__name__}"

    def weight_bytes(self) -> int:
        return weight_bytes(self)


# ---------------------------------------------------------------- Medusa


@dataclass(frozen=True)
class MedusaSpec:
    """Sizes of Medusa's heads: for each draft a stack of blocks, and a matrix to the vocabulary."""

    num_heads: int
    num_layers: int  # of each head
    hidden_size: int
    features: tuple[int, ...]  # see DraftHeadSpec: the model's last states
    vocab_size: int  # that they draft from
    bias: bool = False  # of the blocks
    has_map: bool = False  # the vocabulary is a part of the model's, by a table; without one it is its first tokens


class MedusaHeads(nn.Module):
    """Medusa's heads: head number n drafts the n-th token after the model's next one."""

    def __init__(self, build: Build, spec: MedusaSpec) -> None:
        super().__init__()
        self.spec, self.dtype, size = spec, build.dtype, spec.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                replicated_linear(build, f"blocks.{head}.{layer}", size, size, bias=spec.bias)
                for layer in range(spec.num_layers)
            )
            for head in range(spec.num_heads)
        )
        self.heads = nn.ModuleList(Head(build, spec.vocab_size, size) for _ in range(spec.num_heads))
        self.offsets = DraftVocabulary(build, spec.vocab_size, counts_from_own=False) if spec.has_map else None

    def forward(self, states: torch.Tensor, number: int) -> torch.Tensor:
        """The tokens [rows] int64 of one head, from the model's last states [rows, hidden]."""
        blocks = self.blocks[number]
        assert isinstance(blocks, nn.ModuleList), "each head has blocks"
        for block in blocks:
            states = states + F.silu(block(states))
        tokens: torch.Tensor = self.heads[number](states).argmax(dim=-1)
        return tokens if self.offsets is None else self.offsets(tokens)

    def compile_key(self) -> str:
        return str(self.spec)

    def weight_bytes(self) -> int:
        return weight_bytes(self)
