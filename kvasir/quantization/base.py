"""How the weights of a linear layer are kept and multiplied. Worker process; knows no model, calls no layer.

A layer asks its method to create parameters, to load the checkpoint's tensors into them (parts of a fused matrix one by
one), to rearrange them once all are there, and to apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from kvasir import kernels

# What a checkpoint calls a tensor within its layer, and the part of a fused layer that it fills (None: all of it).
TensorKey = tuple[str, str | None]


@dataclass(frozen=True)
class Part:
    """Some outputs of a linear layer that are one matrix in the checkpoint. `own` is this rank's share of them."""

    name: str | None
    outputs: int
    own: slice

    @property
    def num_own(self) -> int:
        return int(self.own.stop - self.own.start)


@dataclass(frozen=True)
class LinearShape:
    """A linear layer as the checkpoint has it, and which of it this rank keeps."""

    inputs: int
    own_inputs: slice
    parts: tuple[Part, ...]
    bias: bool

    @property
    def num_own_inputs(self) -> int:
        return int(self.own_inputs.stop - self.own_inputs.start)

    @property
    def num_own_outputs(self) -> int:
        return sum(part.num_own for part in self.parts)

    def place(self, name: str | None) -> tuple[Part, slice]:
        """A part, and its rows among this rank's outputs."""
        start = 0
        for part in self.parts:
            if part.name == name:
                return part, slice(start, start + part.num_own)
            start += part.num_own
        raise KeyError(f"There is no part {name!r} among {[part.name for part in self.parts]}.")


class LinearLayer(Protocol):
    """What a method may count on: a module whose parameters it made, and its shape."""

    shape: LinearShape
    weight: nn.Parameter
    bias: nn.Parameter | None


class LinearMethod(Protocol):
    """See the head of this file."""

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Give the layer its parameters, not filled yet."""

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for the layer, with their shapes there."""

    def load(self, layer: LinearLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy this rank's share of a checkpoint's tensor to its place."""

    def process(self, layer: LinearLayer) -> None:
        """All tensors are loaded: bring them into the form that `apply` wants."""

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        """x [rows, own inputs] -> [rows, own outputs], bias added."""


class UnquantizedLinear:
    """The weight as a matrix in the model's own type."""

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        shape = layer.shape
        layer.weight = parameter((shape.num_own_outputs, shape.num_own_inputs), dtype, device)
        layer.bias = parameter((shape.num_own_outputs,), dtype, device) if shape.bias else None

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        shape = layer.shape
        found: dict[TensorKey, tuple[int, ...]] = {}
        for part in shape.parts:
            found["weight", part.name] = (part.outputs, shape.inputs)
            if shape.bias:
                found["bias", part.name] = (part.outputs,)
        return found

    def load(self, layer: LinearLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        part, rows = layer.shape.place(key[1])
        if key[0] == "weight":
            layer.weight.data[rows].copy_(tensor[part.own, layer.shape.own_inputs])
        elif layer.bias is not None:
            layer.bias.data[rows].copy_(tensor[part.own])

    def process(self, layer: LinearLayer) -> None:
        layer.weight = nn.Parameter(kernels.pack_weight(layer.weight.data), requires_grad=False)

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, layer.weight, layer.bias)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter for inference, not filled yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
