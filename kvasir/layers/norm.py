"""Normalisation."""

from __future__ import annotations

import torch

from kvasir import kernels
from kvasir.layers.base import Build, WeightLayer


class RMSNorm(WeightLayer):
    """Root-mean-square norm with a gain."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum, which is the next residual."""
        if residual is None:
            return self(x), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)
