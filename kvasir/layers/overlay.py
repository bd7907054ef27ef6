"""Embeddings in place of those of a step's tokens. Worker process."""

from __future__ import annotations

import torch


class StepOverlay:
    """The overlaid embeddings of the step that runs now. A model has one; a row feature sets it before each step."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None  # [n] int64: which of the step's tokens; None: no token has any
        self.embeddings: torch.Tensor | None = None  # [n, hidden]
        self.num_steps = 0  # in which some token had one

    def clear(self) -> None:
        self.tokens = self.embeddings = None

    def set(self, tokens: torch.Tensor, embeddings: torch.Tensor) -> None:
        self.tokens, self.embeddings = tokens, embeddings
        self.num_steps += 1

    def lay(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embeddings of all tokens [tokens, hidden], with those that are overlaid."""
        if self.tokens is None or self.embeddings is None:
            return hidden
        return hidden.index_copy(0, self.tokens, self.embeddings.to(hidden.dtype))
