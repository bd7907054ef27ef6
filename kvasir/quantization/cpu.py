"""Weights in the CPU library's layouts: bfloat16, 8 or 4 bits quantized while they are loaded, or a GGUF file's own
numbers. Each tensor goes from its file straight to its packed place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch

from kvasir.kernels.cpu.packed import (
    BF16,
    GGUF,
    INT4,
    INT6,
    INT8,
    Arena,
    Format,
    Layout,
    PackedMatrix,
    PackedStack,
    multiply_experts,
)
from kvasir.log import get_logger, warn_once
from kvasir.quantization.base import (
    ExpertsLayer,
    ExpertsMethod,
    LinearLayer,
    LinearMethod,
    PackedParameter,
    TensorKey,
    UnquantizedExperts,
    UnquantizedLinear,
    parameter,
    part_of,
)
from kvasir.quantization.gguf import PackedRows, expanded

logger = get_logger(__name__)
EXPANDED = (
    "Some quantized matrices of the GGUF file are expanded to bf16: they are fused with others that are not quantized, "
    "or the split over workers cuts through a block."
)
PLAIN = UnquantizedLinear()  # keeps the biases
# By `quantization`. Of a GGUF file only the tensors that are not quantized there get this format.
FORMATS = {None: BF16, "int8": INT8, "int4": INT4, "gguf": BF16}
# Layers that are never quantized: small ones that choose a token's experts and weigh the shared one.
ROUTING = (".router", ".shared_gate")


@dataclass(frozen=True)
class CpuLinear:
    """`weight` is the memory of the packed matrix, which `matrix` describes once everything is loaded."""

    format: Format = BF16
    is_plain: ClassVar[bool] = False

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = packed_parameter((self._layout(layer).num_bytes,), device)
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
    """A GGUF file's numbers, packed as they are. The types of a layer's parts are known once they are loaded, so its
    memory is taken in `process`. The whole layer is expanded to `format` where a part is not quantized or a rank's
    share of the inputs cuts through a block."""

    arena: Arena = field(default_factory=Arena)

    def create(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = packed_parameter((0,), device)
        layer.bias = parameter((layer.shape.num_own_outputs,), dtype, device) if layer.shape.bias else None

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if key[0] == "bias":
            PLAIN.load(layer, key, tensor)
        else:
            layer.__dict__.setdefault("parts", {})[key[1]] = tensor  # a view of the mapped file, which takes no memory

    def process(self, layer: LinearLayer) -> None:
        given: dict[str | None, PackedRows | torch.Tensor] = layer.__dict__.pop("parts")
        parts = {name: self._share(layer, name, tensor) for name, tensor in given.items()}
        own = self._own_format(parts.values())
        if own is None and any(isinstance(tensor, PackedRows) and tensor.kind in GGUF for tensor in given.values()):
            warn_once(logger, EXPANDED)
        layout = Layout(own or self.format, layer.shape.num_own_outputs, layer.shape.num_own_inputs)
        layer.weight = PackedParameter(self.arena.take(layout.num_bytes))
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
        """This rank's share, packed if it can be."""
        part, _ = layer.shape.place(name)
        columns = layer.shape.own_inputs
        if not isinstance(tensor, PackedRows):
            return tensor[part.own, columns]
        rows = tensor.cut(part.own)
        return rows.cut_columns(columns) or rows.expand()[:, columns]

    @staticmethod
    def _own_format(parts: Iterable[PackedRows | torch.Tensor]) -> Format | None:
        """A format that holds the numbers of all parts; None: there is none."""
        kinds = [tensor.kind if isinstance(tensor, PackedRows) else "" for tensor in parts]
        if any(kind not in GGUF for kind in kinds):
            return None
        return reduce(Format.joined, (GGUF[kind][1] for kind in kinds))


def packed_parameter(shape: tuple[int, ...], device: torch.device) -> PackedParameter:
    return PackedParameter(torch.empty(shape, dtype=torch.uint8, device=device))


def matrix_of(layer: LinearLayer) -> PackedMatrix:
    matrix: PackedMatrix = layer.__dict__["matrix"]
    return matrix


class CpuMethods:
    """The methods of a model that the library runs."""

    def __init__(self, quantization: str | None) -> None:
        form = FORMATS[quantization]
        self._linear = GGUFCpuLinear(form) if quantization == "gguf" else CpuLinear(form)
        self._experts = CpuExperts(form)

    def linear(self, prefix: str) -> LinearMethod:
        return CpuLinear(BF16) if prefix.endswith(ROUTING) else self._linear

    def experts(self, prefix: str) -> ExpertsMethod:
        return self._experts


# ---------------------------------------------------------------- experts

PLAIN_EXPERTS = UnquantizedExperts()  # knows the checkpoint's tensors


@dataclass(frozen=True)
class CpuExperts:
    """`gate_up` and `down` are the memory of packed matrices, [experts, bytes], which `stacks` describe once everything
    is loaded."""

    format: Format = BF16

    def create(self, layer: ExpertsLayer, dtype: torch.dtype, device: torch.device) -> None:
        for name, layout in self._layouts(layer).items():
            shape = PackedStack.memory_shape(layout, layer.shape.num_experts)
            setattr(layer, name, packed_parameter(shape, device))

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
        return multiply_experts(stacks["gate_up"], stacks["down"], x, weights, chosen, activation)

    def _layouts(self, layer: ExpertsLayer) -> dict[str, Layout]:
        inner, hidden = layer.shape.num_own, layer.shape.hidden_size
        return {"gate_up": Layout(self.format, 2 * inner, hidden), "down": Layout(self.format, hidden, inner)}


# ---------------------------------------------------------------- embedding and head


@dataclass(frozen=True)
class Vocabulary:
    """How the library keeps embedding and head."""

    head: Format  # also of an embedding that the head shares
    as_in_file: bool = False  # a GGUF file's packed rows keep their numbers instead, also in the embedding

    def keeps(self, rows: PackedRows) -> bool:
        return self.as_in_file and rows.kind in GGUF


# By `quantization`. The head keeps more bits than the layers, because errors there change tokens directly.
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
