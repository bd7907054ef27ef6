"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from kvasir.attention.base import AttentionBatch, LastTokens


class Model(Protocol):
    vocab_size: int

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of a step, or those of `last` alone, [sequences, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
