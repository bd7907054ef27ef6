"""A mixture of experts: each token goes to the few experts its router chooses.

Tokens are sorted by expert, so that each expert's stand together and its matrices are read once. Nothing waits for the
device: how many tokens an expert gets is known there only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.base import Build, WeightLayer
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mlp import GatedMLP
from kvasir.quantization.base import TensorKey


class Experts(WeightLayer):
    """The matrices of all experts, stacked; each rank has its share of every expert's inner dimension."""

    def __init__(self, build: Build, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.own = build.mesh.shard(intermediate_size, "moe_intermediate_size")
        self.size = intermediate_size
        inner = self.own.stop - self.own.start
        self.gate_up = build.parameter(num_experts, 2 * inner, hidden_size)
        self.down = build.parameter(num_experts, hidden_size, inner)

    def forward(self, x: torch.Tensor, starts: torch.Tensor, activation: str) -> torch.Tensor:
        """x [rows, hidden] sorted by expert: expert e has the rows starts[e] up to starts[e + 1]."""
        inner = kernels.gated_activation(kernels.grouped_linear(x, self.gate_up, starts), activation)
        return kernels.grouped_linear(inner, self.down, starts)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        experts, hidden, _ = self.down.shape
        found: dict[TensorKey, tuple[int, ...]] = {}
        for expert in range(experts):
            found["weight", f"gate.{expert}"] = found["weight", f"up.{expert}"] = (self.size, hidden)
            found["weight", f"down.{expert}"] = (hidden, self.size)
        return found

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        assert key[1] is not None, "every tensor is one expert's"
        name, expert = key[1].split(".")
        inner = self.down.shape[2]
        if name == "down":
            self.down.data[int(expert)].copy_(tensor[:, self.own])
        else:
            rows = slice(0, inner) if name == "gate" else slice(inner, 2 * inner)
            self.gate_up.data[int(expert), rows].copy_(tensor[self.own])


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
        self.experts = Experts(build, num_experts, hidden_size, intermediate_size)
        self.shared: GatedMLP | None = None
        if shared_size is not None:
            self.shared = GatedMLP(build, f"{prefix}.shared", hidden_size, shared_size, activation, bias=False)
            self.shared_gate = replicated_linear(build, f"{prefix}.shared_gate", hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        order = torch.argsort(chosen.view(-1), stable=True)
        in_order = chosen.view(-1)[order]
        # expert e's rows begin where the first id of at least e stands
        ids = torch.arange(self.router.shape.parts[0].outputs + 1, device=x.device)
        starts = torch.searchsorted(in_order, ids, out_int32=True)
        sorted_y = self.experts(x[order // self.top_k], starts, self.activation)
        y = torch.empty_like(sorted_y)
        y[order] = sorted_y
        # summed in float32, in the router's order, whatever else is in the batch
        out = (y.view(len(x), self.top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)
        out = self.experts.mesh.all_reduce(out)
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen experts' weights in float32 and their numbers, each [tokens, top_k]."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalise else weights), chosen
