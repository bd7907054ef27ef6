"""Methods of keeping and multiplying weights: of linear layers, of a mixture's experts, and which layer gets which.

Worker process; knows no model, calls no layer. A layer asks its method to create parameters, to load the checkpoint's
tensors into them (parts of a fused matrix one by one), to rearrange them once all are loaded, and to apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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

    def fuses_one_row(self, layer: LinearLayer) -> bool:
        """Whether `apply_fused` may be called for one row; asked once the weights are loaded."""

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

    def apply_activated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Return the activation of what `apply` returns."""

    def apply_parts(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        """Return the result of `apply` for a layer without bias, or [parts, rows, own outputs] that
        kernels.add_rms_norm still sums."""

    def apply_fused(self, layer: LinearLayer, x: torch.Tensor, **how: Any) -> torch.Tensor:
        """Compute `apply` for one row, with the operations before and after it in a layer; see kernels.fused_linear."""

    def dense(self, layer: LinearLayer) -> torch.Tensor:
        """The matrix [own outputs, own inputs] that `apply` multiplies with, as floats."""


class UnquantizedLinear:
    """The weight is a matrix in the model's dtype."""

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

    def apply_activated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        return kernels.ACTIVATIONS[activation](self.apply(layer, x))

    def apply_parts(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear_parts(x, layer.weight)

    def fuses_one_row(self, layer: LinearLayer) -> bool:
        return kernels.is_fit(layer.weight)

    def apply_fused(self, layer: LinearLayer, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return kernels.fused_linear(x, layer.weight, layer.bias, **how)

    def dense(self, layer: LinearLayer) -> torch.Tensor:
        return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight.data


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
    """The sizes of a layer's experts; `own` is this rank's share of every expert's inner dimension, `own_experts` are
    the experts that it keeps."""

    num_experts: int
    hidden_size: int
    inner_size: int
    own: slice
    bias: bool = False
    own_experts: slice | None = None  # None: all

    @property
    def num_own(self) -> int:
        return int(self.own.stop - self.own.start)

    @property
    def num_own_experts(self) -> int:
        kept = self.own_experts
        return self.num_experts if kept is None else int(kept.stop - kept.start)

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
    expert's entry in the parameter `stack`. A bias has rows only."""

    stack: str  # gate_up or down
    expert: int | None  # which of this rank's; None: another rank has it
    own: tuple[slice, slice]
    first: int


def part_of(shape: ExpertsShape, key: TensorKey) -> ExpertPart:
    assert key[1] is not None, "every tensor belongs to one expert"
    name, number = key[1].split(".")
    first = 0 if shape.own_experts is None else int(shape.own_experts.start)
    expert = int(number) - first if 0 <= int(number) - first < shape.num_own_experts else None
    if name == "down":
        return ExpertPart("down", expert, (slice(None), shape.own), 0)
    return ExpertPart("gate_up", expert, (shape.own, slice(None)), 0 if name == "gate" else shape.num_own)


class ExpertsLayer(Protocol):
    """What a method sees of its layer: the sizes, and the parameters that the method made. In `gate_up` the rows of an
    expert's gate come before those of its up."""

    shape: ExpertsShape
    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    leaves_parts: bool  # whether the sum over a token's experts may be left to kernels.add_rms_norm


# A name in kernels.ACTIVATIONS, or a clamped SwiGLU's alpha and limit; see kernels.gated_activation.
GatedActivation = str | tuple[float, float]


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
        self,
        layer: ExpertsLayer,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        activation: GatedActivation,
    ) -> torch.Tensor:
        """The weighted sum of the outputs of each token's chosen experts, over this rank's share of them. x [tokens,
        hidden]; weights, in float32, and chosen [tokens, top_k], numbers of this rank's experts. One past the last
        stands for experts of other ranks, with a weight of 0."""

    def dense(self, layer: ExpertsLayer, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's matrices `gate_up` and `down` as plain numbers, for adapters."""


def create_biases(layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
    shape, count = layer.shape, layer.shape.num_own_experts
    layer.gate_up_bias = parameter((count, 2 * shape.num_own), dtype, device) if shape.bias else None
    layer.down_bias = parameter((count, shape.hidden_size), dtype, device) if shape.bias else None


class UnquantizedExperts:
    """All experts' matrices in the model's dtype, stacked. Each expert's matrices are read once. The host never waits:
    only the device knows how many tokens an expert gets."""

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        shape = layer.shape
        count = shape.num_own_experts
        layer.gate_up = parameter((count, 2 * shape.num_own, shape.hidden_size), dtype, device)
        layer.down = parameter((count, shape.hidden_size, shape.num_own), dtype, device)
        create_biases(layer, dtype, device)

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        found: dict[TensorKey, tuple[int, ...]] = {}
        for name, shape in layer.shape.matrices().items():
            found["weight", name] = shape
            if layer.shape.bias:
                found["bias", name] = shape[:1]
        return found

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        part = part_of(layer.shape, key)
        if part.expert is None:
            return
        is_bias = key[0] == "bias"
        own = tensor[part.own[0]] if is_bias else tensor[part.own]
        stack: nn.Parameter = getattr(layer, f"{part.stack}_bias" if is_bias else part.stack)
        stack.data[part.expert, part.first : part.first + len(own)].copy_(own)

    def process(self, layer: ExpertsLayer) -> None:
        return None

    def apply(
        self,
        layer: ExpertsLayer,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        activation: GatedActivation,
    ) -> torch.Tensor:
        return kernels.experts(
            x, weights, chosen, layer.gate_up, layer.down, activation, layer.gate_up_bias, layer.down_bias,
            layer.leaves_parts, layer.shape.own_experts is not None,
        )  # fmt: skip

    def dense(self, layer: ExpertsLayer, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.gate_up.data[expert], layer.down.data[expert]


# ---------------------------------------------------------------- a whole model


class Methods(Protocol):
    """Gives each layer its method, by its path in the model ("layers.3.attention.qkv")."""

    @property
    def keeps_coded(self) -> bool:
        """Whether embedding and head keep a quantized checkpoint's codes, too; otherwise they expand them."""

    def linear(self, prefix: str) -> LinearMethod: ...

    def experts(self, prefix: str) -> ExpertsMethod: ...


class Unquantized:
    """Every weight is kept in the model's dtype."""

    keeps_coded = False

    def linear(self, prefix: str) -> LinearMethod:
        return UnquantizedLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        return UnquantizedExperts()
