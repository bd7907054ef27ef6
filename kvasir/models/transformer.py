"""The decoder: one transformer for every architecture, built from its DecoderSpec. Worker process.

It knows tokens, positions and the step's attention batch; no request, no file, no checkpoint name. Nothing here waits
for the device or loops over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from math import prod

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.errors import ModelError
from kvasir.layers.attention import AttentionLayer
from kvasir.layers.base import Build, DecoderBuild, weight_bytes
from kvasir.layers.embedding import Embedding, Head, PositionEmbedding, TiedHead
from kvasir.layers.linear import replicated_linear
from kvasir.layers.norm import make_norm
from kvasir.messages import KVSpec
from kvasir.models.decoder_layer import LAYERS, DecoderLayer
from kvasir.models.spec import DecoderSpec

MAX_KV_GROUPS = 8  # each group has its own block tables, which take time to build


class Transformer(nn.Module):
    """A decoder with this rank's share of the weights, for positions below `max_positions`."""

    runs_in_cpu_library = False

    def __init__(self, build: Build, spec: DecoderSpec, backend: AttentionBackend, max_positions: int) -> None:
        super().__init__()
        self.spec, self.vocab_size, self.max_positions = spec, spec.vocab_size, max_positions
        self.backend = backend
        width = spec.embedding_size or spec.hidden_size
        self.embedding = Embedding(build, spec.vocab_size, width, tied=spec.tie_embeddings)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if width != spec.hidden_size:
            self.project_in = replicated_linear(build, "project_in", width, spec.hidden_size, bias=False)
            self.project_out = replicated_linear(build, "project_out", spec.hidden_size, width, bias=False)
        # Rounded to the model's dtype, because transformers keeps the scale in a tensor.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=build.dtype))
        self.positions: PositionEmbedding | None = None
        if spec.num_positions is not None:
            self.positions = PositionEmbedding(build, spec.num_positions, spec.position_offset, spec.hidden_size)
        parts = DecoderBuild(**vars(build), hidden_size=spec.hidden_size, backend=backend, max_positions=max_positions)
        layers = [LAYERS.make(parts, layer, f"layers.{index}") for index, layer in enumerate(spec.layers)]
        self.rotaries = nn.ModuleList(parts.rotaries.values())
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(build, spec.final_norm, spec.hidden_size)
        for layer, following in zip(layers, [*(layer.attention_norm for layer in layers[1:]), self.norm], strict=True):
            layer.leave_parts(following)
        if spec.tie_embeddings:
            self.head: nn.Module = TiedHead(self.embedding)
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
        *layers, top = self.layers
        for layer in layers:
            hidden, residual = layer(hidden, residual, positions, batch)
        hidden, residual = top(hidden, residual, positions, batch, last)
        hidden = self.norm.add(hidden, residual)[0]
        projected: torch.Tensor = self.project_out(hidden)
        return projected

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.project_in(self.embedding(input_ids))
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        return hidden if self.positions is None else hidden + self.positions(positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        logits: torch.Tensor = self.head(hidden)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def capturable(self) -> bool:
        """Whether its steps may become CUDA graphs."""
        return self.backend.capturable

    def compile_copy(self) -> Transformer:
        """A copy with one layer of each kind, which launches every kernel variant that all the layers launch."""
        kinds = {layer.spec: layer for layer in self._decoder_layers()}
        short = copy(self)
        short._modules = {**self._modules, "layers": nn.ModuleList(kinds.values())}
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
        page_bytes = prod(self.page_shape(block_size, dtype)) * dtype.itemsize
        windows = tuple(window for window, _ in self._groups)
        return KVSpec(max(len(layers) for _, layers in self._groups), block_size, page_bytes, windows)

    @cached_property
    def _groups(self) -> list[tuple[int | None, list[int]]]:
        windows = [attention.window for attention in self.attentions()]
        # A window as long as the longest sequence hides nothing.
        return group_layers([w if w is not None and w < self.max_positions else None for w in windows])

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, *page_shape]. There is one view for each layer of a group; or
        one for each layer of the model, and then all layers share block tables."""
        attentions = self.attentions()
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
