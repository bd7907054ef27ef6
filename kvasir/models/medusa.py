"""Medusa: for each draft a stack of blocks and a matrix to the vocabulary, all on the model's last states. Worker
process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kvasir.layers.base import Build, weight_bytes
from kvasir.layers.embedding import Head
from kvasir.layers.linear import replicated_linear
from kvasir.models.draft_head import DraftVocabulary


@dataclass(frozen=True)
class MedusaSpec:
    num_heads: int
    num_layers: int  # of each head
    hidden_size: int
    features: tuple[int, ...]  # see DraftHeadSpec: the model's last states
    vocab_size: int  # that they draft from
    bias: bool = False  # of the blocks
    has_map: bool = False  # the vocabulary is a part of the model's, by a table; without one it is its first tokens


class MedusaHeads(nn.Module):
    """Head number n drafts the n-th token after the model's next one."""

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
