"""The feed-forward network, with a gate and without."""

from __future__ import annotations

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.base import Build
from kvasir.layers.linear import column_linear, row_linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self, build: Build, prefix: str, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool
    ) -> None:
        super().__init__()
        halves = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = column_linear(build, f"{prefix}.gate_up", hidden_size, halves, bias=bias)
        self.down = row_linear(build, f"{prefix}.down", intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(kernels.gated_activation(self.gate_up(x), self.activation))
        return y


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self, build: Build, prefix: str, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool
    ) -> None:
        super().__init__()
        self.up = column_linear(build, f"{prefix}.up", hidden_size, {"up": intermediate_size}, bias=bias)
        self.down = row_linear(build, f"{prefix}.down", intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(kernels.ACTIVATIONS[self.activation](self.up(x)))
        return y
