"""The decoder: one transformer for every architecture, shaped by its DecoderSpec. Worker process.

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
from kvasir.layers.attention import Attention
from kvasir.layers.base import Build
from kvasir.layers.embedding import Embedding, Head, PositionEmbedding, TiedHead
from kvasir.layers.linear import replicated_linear
from kvasir.layers.norm import NoNorm, Norm, make_norm
from kvasir.layers.rope import RopeSpec
from kvasir.layers.rotary import Rotary
from kvasir.messages import KVSpec
from kvasir.models.decoder_layer import make_layer
from kvasir.models.kv_groups import group_layers
from kvasir.models.spec import DecoderSpec


class Transformer(nn.Module):
    """A decoder of this rank's share of the weights; `max_positions` bounds the positions it will be asked for."""

    def __init__(self, build: Build, spec: DecoderSpec, backend: AttentionBackend, max_positions: int) -> None:
        super().__init__()
        self.spec, self.vocab_size, self.max_positions = spec, spec.vocab_size, max_positions
        self.backend = backend
        width = spec.embedding_size or spec.hidden_size
        self.embedding = Embedding(build, spec.vocab_size, width, tied=spec.tie_embeddings)
        self.project_in: nn.Module = NoNorm()
        self.project_out: nn.Module = NoNorm()
        if width != spec.hidden_size:
            self.project_in = replicated_linear(build, "project_in", width, spec.hidden_size, bias=False)
            self.project_out = replicated_linear(build, "project_out", spec.hidden_size, width, bias=False)
        # The scale as the model's own type has it: transformers keeps it in a tensor.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=build.dtype))
        self.positions: PositionEmbedding | None = None
        if spec.num_positions is not None:
            self.positions = PositionEmbedding(build, spec.num_positions, spec.position_offset, spec.hidden_size)
        rotaries = {rope: Rotary(build, rope, max_positions) for rope in dict.fromkeys(spec.ropes) if rope is not None}
        self.rotaries = nn.ModuleList(rotaries.values())
        self.layers = nn.ModuleList(
            make_layer(build, spec, index, backend, _rotary(rotaries, rope)) for index, rope in enumerate(spec.ropes)
        )
        self.norm: Norm = NoNorm()
        if spec.final_norm:
            self.norm = make_norm(build, spec.norm, spec.hidden_size, spec.norm_eps)
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
        """The hidden states after the last norm, [tokens, hidden]; or those of `last`, [sequences, hidden]. What other
        tokens are for is over when the last layer has their keys, so most of that layer is spared them."""
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
        return self.backend.capturable

    @property
    def runs_in_cpu_library(self) -> bool:
        return False

    def weight_bytes(self) -> int:
        return module_bytes(self)

    def compile_copy(self) -> Transformer:
        """A copy with one layer of each kind, which launches the kernels that all layers launch."""
        kinds = {}
        for layer, attention in zip(self.layers, self.attentions(), strict=True):
            kinds[attention.window, attention.rotary, *(each.shape for each in layer.parameters())] = layer
        short = copy(self)
        short._modules = {**self._modules, "layers": nn.ModuleList(kinds.values())}
        return short

    # ------------------------------------------------------------ the KV cache

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, int, int, int]:
        """One block of one layer of this rank's cache: [2, block_size, kv_heads, head_dim]. A head's numbers of 8 bits
        are followed by their scale, a float32."""
        extra = 4 if dtype == torch.int8 else 0
        return 2, block_size, self.attentions()[0].kv_heads, self.spec.head_dim + extra

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        """What this rank needs of the cache."""
        page_bytes = prod(self.page_shape(block_size, dtype)) * dtype.itemsize
        windows = tuple(window for window, _ in self._groups)
        return KVSpec(max(len(layers) for _, layers in self._groups), block_size, page_bytes, windows)

    @cached_property
    def _groups(self) -> list[tuple[int | None, list[int]]]:
        # a window that no text outgrows is none
        return group_layers([w if w is not None and w < self.max_positions else None for w in self.spec.windows])

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, 2, block_size, kv_heads, head_dim]: one for each layer of a
        group, or one for each of all layers, which then share block tables."""
        attentions = self.attentions()
        groups = [(None, list(range(len(attentions))))] if len(caches) == len(attentions) else self._groups
        for group, (_, layers) in enumerate(groups):
            for layer, cache in zip(layers, caches, strict=False):
                attentions[layer].kv_cache, attentions[layer].group = cache, group

    def attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]


def _rotary(rotaries: dict[RopeSpec, Rotary], rope: RopeSpec | None) -> Rotary | None:
    return None if rope is None else rotaries[rope]


def module_bytes(module: nn.Module) -> int:
    """Bytes of parameters, buffers and packed matrices; memory that several of them share counts once."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    packed = [getattr(each, "matrix", None) for each in module.modules()]
    tensors += [matrix.memory for matrix in packed if matrix is not None]
    # A tensor in oneDNN's own layout has no address.
    places = {id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.element_size() * tensor.numel() for tensor in places.values())
