"""Weights in the CPU library's layouts: bfloat16, or 8 or 4 bits quantized while they are loaded, or a GGUF file's own
numbers. Each tensor goes from its file straight to its packed place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn

from kvasir.kernels.cpu.experts import PackedStack, multiply
from kvasir.kernels.cpu.memory import Arena
from kvasir.kernels.cpu.packed import BF16, GGUF, INT4, INT6, INT8, Format, Layout, PackedMatrix
from kvasir.log import get_logger, warn_once
from kvasir.quantization.base import LinearLayer, LinearMethod, TensorKey, UnquantizedLinear, parameter
from kvasir.quantization.experts import ExpertsLayer, ExpertsMethod, UnquantizedExperts, part_of
from kvasir.quantization.gguf import PackedRows, expanded

logger = get_logger(__name__)
EXPANDED = (
    "Some quantized matrices of the GGUF file are expanded to bf16: they are one here with others that are not "
    "quantized, or are cut through a block to be shared by workers."
)
PLAIN = UnquantizedLinear()  # biases are kept as it keeps them
# By `quantization`. A GGUF file's is for what is not quantized there; experts it has none, such files are refused.
FORMATS = {None: BF16, "int8": INT8, "int4": INT4, "gguf": BF16}
# Layers that are never quantized: small ones that decide which experts a token goes to, and how much of one it gets.
ROUTING = (".router", ".shared_gate")


@dataclass(frozen=True)
class CpuLinear:
    """`weight` is the packed matrix's memory; `matrix` says how to read it, once everything is loaded."""

    format: Format = BF16

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = parameter((self._layout(layer).num_bytes,), torch.uint8, device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def tensors(self, layer: LinearLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return PLAIN.tensors(layer)

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
            return
        part, rows = layer.shape.place(key[1])
        self._matrix(layer).fill(expanded(tensor)[part.own, layer.shape.own_inputs], rows.start)

    def process(self, layer: LinearLayer) -> None:
        layer.__dict__["matrix"] = self._matrix(layer)

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return matrix_of(layer).linear(x)

    def _layout(self, layer: LinearLayer) -> Layout:
        return Layout(self.format, layer.shape.num_own_outputs, layer.shape.num_own_inputs)

    def _matrix(self, layer: LinearLayer) -> PackedMatrix:
        bias = None if layer.bias is None else layer.bias.data
        return PackedMatrix(self._layout(layer), layer.weight.data, bias)


@dataclass(frozen=True)
class GGUFCpuLinear(CpuLinear):
    """A GGUF file's numbers, packed as they are. Which types a layer's parts have is known once they are there, so its
    memory is taken last. A layer is expanded to `format` as a whole where a part is not quantized or a rank's share of
    the inputs does not begin and end with a block."""

    arena: Arena = field(default_factory=Arena)

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = parameter((0,), torch.uint8, device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
        else:
            layer.__dict__.setdefault("parts", {})[key[1]] = tensor  # the file is mapped: this is no memory yet

    def process(self, layer: LinearLayer) -> None:
        given: dict[str | None, PackedRows | torch.Tensor] = layer.__dict__.pop("parts")
        parts = {name: self._share(layer, name, tensor) for name, tensor in given.items()}
        own = self._own_format(parts.values())
        if own is None and any(isinstance(tensor, PackedRows) and tensor.kind in GGUF for tensor in given.values()):
            warn_once(logger, EXPANDED)
        layout = Layout(own or self.format, layer.shape.num_own_outputs, layer.shape.num_own_inputs)
        layer.weight = nn.Parameter(self.arena.take(layout.num_bytes), requires_grad=False)
        matrix = PackedMatrix(layout, layer.weight.data, None if layer.bias is None else layer.bias.data)
        for name, tensor in parts.items():
            _, rows = layer.shape.place(name)
            if own is not None and isinstance(tensor, PackedRows):
                matrix.fill_gguf(tensor.data, tensor.kind, rows.start)
            else:
                matrix.fill(expanded(tensor), rows.start)
        layer.__dict__["matrix"] = matrix

    @staticmethod
    def _share(layer: LinearLayer, name: str | None, tensor: PackedRows | torch.Tensor) -> PackedRows | torch.Tensor:
        """This rank's, packed if it can be."""
        part, _ = layer.shape.place(name)
        columns = layer.shape.own_inputs
        if not isinstance(tensor, PackedRows):
            return tensor[part.own, columns]
        rows = tensor.cut(part.own)
        return rows.cut_columns(columns) or rows.expand()[:, columns]

    @staticmethod
    def _own_format(parts: Iterable[PackedRows | torch.Tensor]) -> Format | None:
        """One that holds the numbers of all parts; None: there is none."""
        kinds = [tensor.kind if isinstance(tensor, PackedRows) else "" for tensor in parts]
        if any(kind not in GGUF for kind in kinds):
            return None
        return reduce(Format.joined, (GGUF[kind][1] for kind in kinds))


def matrix_of(layer: LinearLayer) -> PackedMatrix:
    matrix: PackedMatrix = layer.__dict__["matrix"]
    return matrix


class CpuMethods:
    """Of a model that the library runs."""

    def __init__(self, quantization: str | None) -> None:
        form = FORMATS[quantization]
        self._linear = GGUFCpuLinear(form) if quantization == "gguf" else CpuLinear(form)
        self._experts = CpuExperts(form)

    def linear(self, prefix: str) -> LinearMethod:
        return CpuLinear(BF16) if prefix.endswith(ROUTING) else self._linear

    def experts(self, prefix: str) -> ExpertsMethod:
        return self._experts


# ----------------------------------------------------------------
# Experts in the CPU library's layouts, quantized while they are loaded where that is asked for.

PLAIN_EXPERTS = UnquantizedExperts()  # the checkpoint's tensors are the same


@dataclass(frozen=True)
class CpuExperts:
    """`gate_up` and `down` are the packed matrices' memory, [experts, bytes]; `stacks` say how to read them, once
    everything is loaded."""

    format: Format = BF16

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        for name, layout in self._layouts(layer).items():
            shape = PackedStack.memory_shape(layout, layer.shape.num_experts)
            setattr(layer, name, parameter(shape, torch.uint8, device))

    def tensors(self, layer: ExpertsLayer) -> Mapping[TensorKey, tuple[int, ...]]:
        return PLAIN_EXPERTS.tensors(layer)

    def load(self, layer: ExpertsLayer, key: TensorKey, tensor: torch.Tensor) -> None:
        part = part_of(layer.shape, key)
        stack = PackedStack(self._layouts(layer)[part.stack], getattr(layer, part.stack).data)
        stack.matrix(part.expert).fill(tensor[part.own], part.first)

    def process(self, layer: ExpertsLayer) -> None:
        stacks = {name: PackedStack(layout, getattr(layer, name).data) for name, layout in self._layouts(layer).items()}
        layer.__dict__["stacks"] = stacks

    def apply(
        self, layer: ExpertsLayer, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, activation: str
    ) -> torch.Tensor:
        stacks: dict[str, PackedStack] = layer.__dict__["stacks"]
        return multiply(stacks["gate_up"], stacks["down"], x, weights, chosen, activation)

    def _layouts(self, layer: ExpertsLayer) -> dict[str, Layout]:
        inner, hidden = layer.shape.num_own, layer.shape.hidden_size
        return {"gate_up": Layout(self.format, 2 * inner, hidden), "down": Layout(self.format, hidden, inner)}


# ----------------------------------------------------------------
# Embedding and head in the CPU library's layouts.


@dataclass(frozen=True)
class Vocabulary:
    """How the library keeps the matrices at both ends."""

    head: Format  # also of an embedding that is the head
    as_in_file: bool = False  # a GGUF file's packed rows keep their numbers instead, also in the embedding

    def keeps(self, rows: PackedRows) -> bool:
        return self.as_in_file and rows.kind in GGUF


# By `quantization`. The head is the last to be cut short.
VOCABULARIES = {
    None: Vocabulary(BF16),
    "int8": Vocabulary(INT8),
    "int4": Vocabulary(INT6),
    "gguf": Vocabulary(BF16, as_in_file=True),
}


def pack_as_in_file(rows: PackedRows, bias: torch.Tensor | None) -> PackedMatrix:
    layout = Layout(GGUF[rows.kind][1], *rows.shape)
    matrix = PackedMatrix(layout, Arena().take(layout.num_bytes), bias)
    matrix.fill_gguf(rows.data, rows.kind)
    return matrix
