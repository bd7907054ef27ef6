"""The feed-forward network, with a gate and without."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.base import Build, WeightLayer
from kvasir.layers.linear import column_linear, replicated_linear, row_linear
from kvasir.quantization.base import TensorKey
from kvasir.quantization.experts import ExpertsShape


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


# ----------------------------------------------------------------
# A mixture of experts: each token goes to the few experts its router chooses.


class Experts(WeightLayer):
    """The matrices of all experts, by any method of keeping them; each rank has its share of every expert's inner
    dimension, and outputs are summed over ranks."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, build: Build, prefix: str, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        own = build.mesh.shard(intermediate_size, "moe_intermediate_size")
        self.mesh, self.shape = build.mesh, ExpertsShape(num_experts, hidden_size, intermediate_size, own)
        self.method = build.methods.experts(prefix)
        self.method.create(self, build.dtype, build.device)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str) -> torch.Tensor:
        """See ExpertsMethod.apply."""
        return self.mesh.all_reduce(self.method.apply(self, x, weights, chosen, activation))

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return self.method.tensors(self)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.method.load(self, key, tensor)

    def process(self) -> None:
        self.method.process(self)


class MoE(nn.Module):
    """Experts behind a router, beside an expert for all tokens if `shared_size` says so."""

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        num_experts: int,
        top_k: int,
        normalise: bool,
        shared_size: int | None,
    ) -> None:
        super().__init__()
        self.top_k, self.normalise, self.activation = top_k, normalise, activation
        self.router = replicated_linear(build, f"{prefix}.router", hidden_size, num_experts, bias=False)
        self.experts = Experts(build, f"{prefix}.experts", num_experts, hidden_size, intermediate_size)
        self.shared: GatedMLP | None = None
        if shared_size is not None:
            self.shared = GatedMLP(build, f"{prefix}.shared", hidden_size, shared_size, activation, bias=False)
            self.shared_gate = replicated_linear(build, f"{prefix}.shared_gate", hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        out = self.experts(x, weights, chosen, self.activation)
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts' weights in float32 and their numbers, each [tokens, top_k]."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalise else weights), chosen
