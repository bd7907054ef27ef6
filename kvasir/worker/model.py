"""All that the worker asks of a model, whether Kvasir, the CPU library or transformers runs its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.messages import KVSpec


class Model(Protocol):
    vocab_size: int
    poolers: Any  # PoolingHeads by task, with the methods of a dict; empty: the model generates text

    @property
    def capturable(self) -> bool:
        """Whether its steps may become CUDA graphs."""

    @property
    def runs_in_cpu_library(self) -> bool:
        """Whether the CPU library computes its steps, so that torch needs no threads of its own."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of a step, or those of `last` alone, [sequences, hidden]."""

    @property
    def recorded(self) -> torch.Tensor | None:
        """What the last `forward` recorded, [tokens, layers * hidden]; None: nothing."""

    def record(self, layers: Sequence[int]) -> None:
        """From now on `forward` records the residual stream that enters each of these layers, and for one more than
        the last layer, the states after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        """What this rank needs of the KV cache."""

    def page_shape(self, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one block of one layer of this rank's cache."""

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, *page_shape]."""

    def compile_key(self) -> str:
        """Return what the kernels of this model depend on, as text."""

    def compile_copy(self) -> Model | None:
        """A copy with one layer of each kind, which launches every kernel variant that the model does. None where its
        kernels cannot be compiled ahead."""

    def weight_bytes(self) -> int:
        """Memory of its weights on this device."""
