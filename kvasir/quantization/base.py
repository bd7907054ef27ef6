"""Methods of keeping and multiplying weights: of linear layers, of a mixture's experts, and which layer gets which.

Worker process; knows no model, calls no layer. A layer asks its method to create parameters, to load the checkpoint's
tensors into them (parts of a fused matrix one by one), to rearrange them once all are loaded, and to apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from kvasir import kernels

# A tensor's name within its layer in the checkpoint, and the part of a fused layer that it fills (None: all of it).
TensorKey = tuple[str, str | None]


@dataclass(frozen=True)
class MatrixPart:
    """Outputs of a linear layer that are one matrix in the checkpoint. `own` is this rank's share of them."""

    name: str | None
    outputs: int
    own: slice

    @property
    def num_own(self) -> int:
        return int(self.own.stop - self.own.start)


@dataclass(frozen=True)
class LinearShape:
    """A linear layer's sizes in the checkpoint, and the share that this rank keeps."""

    inputs: int
    own_inputs: slice
    parts: tuple[MatrixPart, ...]
    bias: bool

    @property
    def num_own_inputs(self) -> int:
        return int(self.own_inputs.stop - self.own_inputs.start)

    @property
    def num_own_outputs(self) -> int:
        return sum(part.num_own for part in self.parts)

    def place(self, name: str | None) -> tuple[MatrixPart, slice]:
        """A part, and its rows among this rank's outputs."""
        start = 0
        for part in self.parts:
            if part.name == name:
                return part, slice(start, start + part.num_own)
            start += part.num_own
        raise KeyError(f"There is no part {name!r} among {[part.name for part in self.parts]}.")


class LinearLayer(Protocol):
    """What a method sees of its layer: the sizes, and the parameters that the method made."""

    shape: LinearShape
    weight: nn.Parameter
    bias: nn.Parameter | None


class LinearMethod(Protocol):
    """A way of keeping and multiplying the weights of linear layers."""

    @property
    def is_plain(self) -> bool:
        """Whether `layer.weight` is the matrix in the model's dtype, so that fused kernels may multiply with it."""

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Give the layer its parameters, which are not filled yet."""

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for the layer, with their shapes there."""

    def load(self, layer: LinearLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy this rank's share of a checkpoint's tensor to its place."""

    def process(self, layer: LinearLayer) -> None:
        """Called after all tensors are loaded, to bring them into the form that `apply` reads."""

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        """x [rows, own inputs] -> [rows, own outputs], bias added."""


class UnquantizedLinear:
    """The weight is a matrix in the model's dtype."""

    is_plain = True

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
    """A parameter for inference, which is not filled yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class PackedParameter(nn.Parameter):
    """Bytes of matrices in the CPU library's layouts. They are written through the layer's `load`, never as numbers,
    and lie in huge pages (kernels.cpu.packed.Arena)."""

    def __new__(cls, memory: torch.Tensor) -> PackedParameter:
        assert memory.dtype == torch.uint8, "packed matrices are bytes"
        made: PackedParameter = super().__new__(cls, memory, requires_grad=False)
        return made


# ---------------------------------------------------------------- experts


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of a layer's experts; `own` is this rank's share of every expert's inner dimension."""

    num_experts: int
    hidden_size: int
    inner_size: int
    own: slice

    @property
    def num_own(self) -> int:
        return int(self.own.stop - self.own.start)

    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of the checkpoint's matrices, by the names of the parts they fill."""
        found = {}
        for expert in range(self.num_experts):
            found[f"gate.{expert}"] = found[f"up.{expert}"] = (self.inner_size, self.hidden_size)
            found[f"down.{expert}"] = (self.hidden_size, self.inner_size)
        return found


@dataclass(frozen=True)
class ExpertPart:
    """Where a matrix of the checkpoint goes: its slice `own` (rows, columns) to the rows from `first` on of the
    expert's entry in the parameter `stack`."""

    stack: str  # gate_up or down
    expert: int
    own: tuple[slice, slice]
    first: int


def part_of(shape: ExpertsShape, key: TensorKey) -> ExpertPart:
    assert key[1] is not None, "every tensor belongs to one expert"
    name, expert = key[1].split(".")
    if name == "down":
        return ExpertPart("down", int(expert), (slice(None), shape.own), 0)
    return ExpertPart("gate_up", int(expert), (shape.own, slice(None)), 0 if name == "gate" else shape.num_own)


class ExpertsLayer(Protocol):
    """What a method sees of its layer: the sizes, and the parameters that the method made. In `gate_up` the rows of an
    expert's gate come before those of its up."""

    shape: ExpertsShape
    gate_up: nn.Parameter
    down: nn.Parameter


class ExpertsMethod(Protocol):
    """A way of keeping and multiplying the matrices of experts."""

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Give the layer its parameters, which are not filled yet."""

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for the layer, with their shapes there."""

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy this rank's share of a checkpoint's tensor to its place."""

    def process(self, layer: ExpertsLayer) -> None:
        """Called after all tensors are loaded, to bring them into the form that `apply` reads."""

    def apply(
        self, layer: ExpertsLayer, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """The weighted sum of the outputs of each token's chosen experts, over this rank's share of them. x [tokens,
        hidden]; weights, in float32, and chosen [tokens, top_k]."""


class UnquantizedExperts:
    """All experts' matrices in the model's dtype, stacked. Tokens are sorted by expert, so that each expert's matrices
    are read once. The host never waits: only the device knows how many tokens an expert gets."""

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
        # Expert e's rows begin at the first id that is at least e.
        ids = torch.arange(layer.shape.num_experts + 1, device=x.device)
        starts = torch.searchsorted(in_order, ids, out_int32=True)
        both = kernels.grouped_linear(x[order // top_k], layer.gate_up, starts)
        sorted_y = kernels.grouped_linear(kernels.gated_activation(both, activation), layer.down, starts)
        y = torch.empty_like(sorted_y)
        y[order] = sorted_y
        # Summed in float32 and in the router's order, so that the rest of the batch changes nothing.
        return (y.view(tokens, top_k, -1) * weights[:, :, None]).sum(1).to(x.dtype)


# ---------------------------------------------------------------- a whole model


class Methods(Protocol):
    """Gives each layer its method, by its path in the model ("layers.3.attention.qkv")."""

    def linear(self, prefix: str) -> LinearMethod: ...

    def experts(self, prefix: str) -> ExpertsMethod: ...


class Unquantized:
    """Every weight is kept in the model's dtype."""

    def linear(self, prefix: str) -> LinearMethod:
        return UnquantizedLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return UnquantizedExperts()
