"""The decoder: one transformer for every architecture, built from its DecoderSpec. Worker process.

It knows tokens, positions and the step's attention batch; no request, no file, no checkpoint name. Nothing here waits
for the device or loops over tokens. A layer registers for the class of its spec (LAYERS) and asks its parts what may be
fused; it knows no kind of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from math import prod

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.config.pooling import PoolerSpec
from kvasir.errors import ModelError
from kvasir.layers import latent_attention  # noqa: F401  # it registers its kind
from kvasir.layers.attention import ATTENTIONS, AttentionLayer
from kvasir.layers.base import Build, DecoderBuild, Kinds, weight_bytes
from kvasir.layers.embedding import Embedding, Head, PositionEmbedding, StepOverlay, TiedHead, TokenTypeEmbedding
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mlp import FEED_FORWARDS
from kvasir.layers.norm import Norm, make_norm
from kvasir.layers.pooler import Poolers
from kvasir.messages import KVSpec
from kvasir.models.spec import DecoderSpec, LayerSpec, ParallelLayerSpec, PostNormLayerSpec

States = tuple[torch.Tensor, torch.Tensor | None]  # what the last layer adds, and the residual it is added to

MAX_KV_GROUPS = 8  # each group has its own block tables, which take time to build

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
        self.adapters = build.adapters

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> States:
        plain = self.adapters is None or self.adapters.is_plain
        if residual is None and plain and kernels.fuses_one_row(hidden) and self.fuses:
            return self._one_row(hidden, positions, batch), None
        hidden, residual = self.attention_norm.add(hidden, residual)
        hidden = self._scaled(self.attention_post_norm(self.attention(hidden, positions, batch, last)))
        hidden, residual = self.mlp_norm.add(hidden, _kept(residual, last))
        return self._scaled(self.mlp_post_norm(self.mlp(hidden))), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    # ------------------------------------------------------------ fusing

    def _one_row(self, stream: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Compute the layer for one row in fewer launches: norms, activation and residual are inside the products."""
        stream = self.attention.one_row(stream, self.attention_norm, positions, batch)
        return self.mlp.one_row(stream, self.mlp_norm)

    @cached_property
    def fuses(self) -> bool:
        """Whether `_one_row` computes this layer. It is asked once the weights are loaded."""
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
        hidden = self.attention_post_norm.of_sum(attended, _kept(hidden, last))
        return self.mlp_post_norm.of_sum(self.mlp(hidden), hidden), None


def _kept(x: torch.Tensor, last: LastTokens | None) -> torch.Tensor:
    return x if last is None else last.of(x)


class StateRecorder:
    """Keeps hidden states of a forward pass for whoever asked: a drafter reads them."""

    def __init__(self, places: dict[int, list[int]] | None = None, count: int = 0) -> None:
        self.places = places or {}  # layer -> where its states stand among the recorded ones
        self.count = count
        self.states: torch.Tensor | None = None  # [tokens, count * hidden]

    @classmethod
    def of(cls, layers: Sequence[int]) -> StateRecorder:
        places = {layer: [at for at, each in enumerate(layers) if each == layer] for layer in layers}
        return cls(places, len(layers))

    def within(self, num_layers: int, fewer: int) -> StateRecorder:
        """Return the recorder of a copy with fewer layers, at least two: it records as many states, those of other
        layers at the second one."""
        inner = [at for layer, places in self.places.items() if layer < num_layers for at in places]
        ends = {1: inner, fewer: self.places.get(num_layers, [])}
        return StateRecorder({layer: places for layer, places in ends.items() if places}, self.count)

    def wants(self, layer: int) -> bool:
        return layer in self.places

    def start(self, hidden: torch.Tensor) -> None:
        if self.count:
            self.states = hidden.new_empty(len(hidden), self.count * hidden.shape[-1])

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copy the states at this layer: later kernels may write over them."""
        for place in self.places.get(layer, ()):
            assert self.states is not None and len(hidden) == len(self.states), "states of all tokens are recorded"
            self.states[:, place * hidden.shape[-1] : (place + 1) * hidden.shape[-1]] = hidden


class Transformer(nn.Module):
    """A decoder with this rank's share of the weights, for positions below `max_positions`."""

    runs_in_cpu_library = False

    def __init__(
        self,
        build: Build,
        spec: DecoderSpec,
        backend: AttentionBackend,
        max_positions: int,
        poolers: Sequence[PoolerSpec] = (),
    ) -> None:
        super().__init__()
        self.poolers = Poolers(build, poolers)
        self.spec, self.vocab_size, self.max_positions = spec, spec.vocab_size, max_positions
        self.backend, self.adapters, self.overlay = backend, build.adapters, StepOverlay()
        self._recorder = StateRecorder()
        width = spec.embedding_size or spec.hidden_size
        self.embedding = Embedding(build, spec.vocab_size, width, tied=spec.tie_embeddings)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if width != spec.hidden_size:
            self.project_in = replicated_linear(build, "project_in", width, spec.hidden_size, bias=False)
            self.project_out = replicated_linear(build, "project_out", spec.hidden_size, width, bias=False)
        # Rounded to the model's dtype, because transformers keeps the scale in a tensor.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=build.dtype))
        self.token_types: TokenTypeEmbedding | None = None
        if spec.num_token_types:
            self.token_types = TokenTypeEmbedding(build, spec.num_token_types, spec.vocab_size, width)
        self.positions: PositionEmbedding | None = None
        if spec.num_positions is not None:
            self.positions = PositionEmbedding(build, spec.num_positions, spec.position_offset, spec.hidden_size)
        self.embedding_norm = make_norm(build, spec.embedding_norm, spec.hidden_size)
        parts = DecoderBuild(**vars(build), hidden_size=spec.hidden_size, backend=backend, max_positions=max_positions)
        layers = [LAYERS.make(parts, layer, f"layers.{index}") for index, layer in enumerate(spec.layers)]
        self.rotaries = nn.ModuleList(parts.rotaries.values())
        self.biases = nn.ModuleList(parts.biases.values())
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(build, spec.final_norm, spec.hidden_size)
        for layer, following in zip(layers, [*(layer.attention_norm for layer in layers[1:]), self.norm], strict=True):
            layer.leave_parts(following)
        self.head: nn.Module | None = None
        if not spec.has_head:
            return
        if spec.tie_embeddings:
            self.head = TiedHead(self.embedding)
        else:
            self.head = Head(build, spec.vocab_size, width, bias=spec.head_bias)

    def forward(
        self,
        input_ids: torch.Tensor,  # [tokens] int64
        positions: torch.Tensor,  # [tokens] int64
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """The hidden states after the last norm, [tokens, hidden], or those of `last`, [sequences, hidden]. The last
        layer then computes only keys and values of the other tokens."""
        hidden, residual = self._embed(input_ids, positions), None
        recorder, top = self._recorder, len(self.layers) - 1
        recorder.start(hidden)
        for index, layer in enumerate(self.layers):
            if residual is not None and recorder.wants(index):
                # The stream is what the layer's norm sums. `hidden` alone may be parts.
                norm: Norm = layer.attention_norm  # type: ignore[assignment]
                hidden, residual = norm.add(hidden, residual)[1], None
            recorder.take(index, hidden)
            hidden, residual = layer(hidden, residual, positions, batch, last if index == top else None)
        hidden = self.norm.add(hidden, residual)[0]
        recorder.take(top + 1, hidden)
        projected: torch.Tensor = self.project_out(hidden)
        return projected

    # ------------------------------------------------------------ hidden states for others

    def record(self, layers: Sequence[int]) -> None:
        """From now on `forward` leaves in `recorded`, side by side, the residual stream that enters each of these
        layers. One more than the last layer stands for the states after the last norm."""
        count = len(self.layers)
        if unknown := [layer for layer in layers if not 0 <= layer <= count]:
            raise ModelError(f"The model has {count} layers, so no states enter layer {unknown[0]}.")
        self._recorder = StateRecorder.of(layers)

    @property
    def recorded(self) -> torch.Tensor | None:
        """States that the last `forward` recorded, [tokens, layers * hidden]; None if nothing is recorded."""
        return self._recorder.states

    @property
    def records(self) -> bool:
        return bool(self._recorder.places)

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        types = None
        if self.token_types is not None:
            types, input_ids = self.token_types(input_ids)
        hidden: torch.Tensor = self.project_in(self.embedding(input_ids))
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        prompts = None if self.adapters is None else self.adapters.prompts
        if prompts is not None and prompts.embeddings is not None:
            hidden = hidden.index_copy(0, prompts.tokens, prompts.embeddings.to(hidden.dtype))
        hidden = self.overlay.lay(hidden)
        if types is not None:
            hidden = hidden + types
        if self.positions is not None:
            return self.embedding_norm.of_sum(self.positions(positions), hidden)
        return self.embedding_norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        assert self.head is not None, "a model without a head has no logits"
        logits: torch.Tensor = self.head(hidden)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def capturable(self) -> bool:
        """Whether its steps may become CUDA graphs."""
        return self.backend.capturable and (self.head is not None or self.spec.is_encoder)

    def compile_key(self) -> str:
        return f"{self.spec} {self.max_positions} {type(self.backend).__name__}"

    def compile_copy(self) -> Transformer:
        """Make a copy with few layers that launches every kernel variant of the model: one layer of each kind, and the
        last one, which may run for fewer tokens than the others."""
        layers = list(self._decoder_layers())
        kinds = {layer.spec: layer for layer in layers}
        short = copy(self)
        short._modules = {**self._modules, "layers": nn.ModuleList([*kinds.values(), layers[-1]])}
        short._recorder = self._recorder.within(len(layers), len(short.layers))
        return short

    def weight_bytes(self) -> int:
        return weight_bytes(self)

    # ------------------------------------------------------------ the KV cache

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        """One block of one layer of this rank's cache, as the model's kind of attention declares it."""
        shapes = {attention.page_shape(block_size, dtype) for attention in self.attentions()}
        if len(shapes) > 1:
            raise ModelError(f"The layers of this model need pages of {len(shapes)} shapes; one shape is supported.")
        return shapes.pop()

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        """What this rank needs of the cache."""
        if not self._groups:
            return KVSpec(0, block_size, 0, ())
        page_bytes = prod(self.page_shape(block_size, dtype)) * dtype.itemsize
        windows = tuple(window for window, _ in self._groups)
        return KVSpec(max(len(layers) for _, layers in self._groups), block_size, page_bytes, windows)

    @cached_property
    def _groups(self) -> list[tuple[int | None, list[int]]]:
        if self.spec.is_encoder:
            return []
        windows = [attention.window for attention in self.attentions()]
        # A window as long as the longest sequence hides nothing.
        return group_layers([w if w is not None and w < self.max_positions else None for w in windows])

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, *page_shape]. There is one view for each layer of a group; or
        one for each layer of the model, and then all layers share block tables."""
        attentions = self.attentions()
        if not self._groups:
            return
        groups = [(None, list(range(len(attentions))))] if len(caches) == len(attentions) else self._groups
        for group, (_, layers) in enumerate(groups):
            for layer, cache in zip(layers, caches, strict=False):
                attentions[layer].kv_cache, attentions[layer].group = cache, group

    def attentions(self) -> list[AttentionLayer]:
        return [layer.attention for layer in self._decoder_layers()]

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def group_layers(windows: Sequence[int | None]) -> list[tuple[int | None, list[int]]]:
    """Which layers share block tables: the groups' windows and layers, groups without a window first.

    Layers with the same window make a group. All groups take their blocks from one pool of equal blocks, so the layers
    of a frequent window are divided into groups of about as many layers as the rarest window has.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[1][0]))
    size = max(min(len(layers) for layers in kinds.values()), -(-len(windows) // MAX_KV_GROUPS))
    return [(window, layers[at : at + size]) for window, layers in ordered for at in range(0, len(layers), size)]
