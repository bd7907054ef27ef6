"""Experts in the CPU library's layouts, quantized while they are loaded where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvasir.kernels.cpu.experts import PackedStack, multiply
from kvasir.kernels.cpu.packed import BF16, Format, Layout
from kvasir.quantization.base import TensorKey, parameter
from kvasir.quantization.experts import ExpertsLayer, UnquantizedExperts, part_of

PLAIN = UnquantizedExperts()  # the checkpoint's tensors are the same


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
        return PLAIN.tensors(layer)

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
