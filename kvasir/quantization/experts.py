"""How the matrices of a mixture's experts are kept and multiplied. Worker process; knows no model, calls no layer.

What quantization.base is for linear layers: a layer asks its method to create parameters, to load the checkpoint's
tensors into them (one expert's matrix at a time), to rearrange them once all are there, and to apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from kvasir import kernels
from kvasir.quantization.base import TensorKey, parameter


@dataclass(frozen=True)
class ExpertsShape:
    """Experts as the checkpoint has them; `own` is this rank's share of every expert's inner dimension."""

    num_experts: int
    hidden_size: int
    inner_size: int
    own: slice

    @property
    def num_own(self) -> int:
        return int(self.own.stop - self.own.start)

    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """The checkpoint's matrices by the names of their parts, and their shapes there."""
        found = {}
        for expert in range(self.num_experts):
            found[f"gate.{expert}"] = found[f"up.{expert}"] = (self.inner_size, self.hidden_size)
            found[f"down.{expert}"] = (self.hidden_size, self.inner_size)
        return found


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrix, of which this rank keeps `own` (rows and columns there) in rows `first` and on of its
    expert's entry in the parameter `stack`."""

    stack: str  # gate_up or down
    expert: int
    own: tuple[slice, slice]
    first: int


def part_of(shape: ExpertsShape, key: TensorKey) -> ExpertPart:
    assert key[1] is not None, "every tensor is one expert's"
    name, expert = key[1].split(".")
    if name == "down":
        return ExpertPart("down", int(expert), (slice(None), shape.own), 0)
    return ExpertPart("gate_up", int(expert), (shape.own, slice(None)), 0 if name == "gate" else shape.num_own)


class ExpertsLayer(Protocol):
    """What a method may count on: a module whose parameters it made, and its shape. A gate stands above its up."""

    shape: ExpertsShape
    gate_up: nn.Parameter
    down: nn.Parameter


class ExpertsMethod(Protocol):
    """See the head of this file."""

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Give the layer its parameters, not filled yet."""

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for the layer, with their shapes there."""

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy this rank's share of a checkpoint's tensor to its place."""

    def process(self, layer: ExpertsLayer) -> None:
        """All tensors are loaded: bring them into the form that `apply` wants."""

    def apply(
        self, layer: ExpertsLayer, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """The weighted sum of what each token's chosen experts make of it, by this rank's share of them. x [tokens,
        hidden]; weights, in float32, and chosen [tokens, top_k]."""


class UnquantizedExperts:
    """All experts' matrices in the model's own type, stacked. Tokens are sorted by expert, so that each expert's stand
    together and its matrices are read once. Nothing waits for the device: how many tokens an expert gets is known there
    only."""

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        shape = layer.shape
        layer.gate_up = parameter((shape.num_experts, 2 * shape.num_own, shape.hidden_size), dtype, device)
        layer.down = parameter((shape.num_experts, shape.hidden_size, shape.num_own), dtype, device)

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return {("weight", name): shape for name, shape in layer.shape.matrices().items()}

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        part = part_of(layer.shape, key)
        own = tensor[part.own]
        stack: nn.Parameter = getattr(layer, part.stack)
        stack.data[part.expert, part.first : part.first + len(own)].copy_(own)

    def process(self, layer: ExpertsLayer) -> None:
        return None

    def apply(
        self, layer: ExpertsLayer, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str
    ) -> torch.Tensor:
        tokens, top_k = chosen.shape
        order = torch.argsort(chosen.view(-1), stable=True)
        in_order = chosen.view(-1)[order]
        # expert e's rows begin where the first id of at least e stands
        ids = torch.arange(layer.shape.num_experts + 1, device=x.device)
        starts = torch.searchsorted(in_order, ids, out_int32=True)
        both = kernels.grouped_linear(x[order // top_k], layer.gate_up, starts)
        sorted_y = kernels.grouped_linear(kernels.gated_activation(both, activation), layer.down, starts)
        y = torch.empty_like(sorted_y)
        y[order] = sorted_y
        # summed in float32, in the router's order, whatever else is in the batch
        return (y.view(tokens, top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)
