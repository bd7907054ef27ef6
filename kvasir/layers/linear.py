"""Linear layers: one matrix or several fused, whole or split over ranks, with weights kept by any method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.adapters import LinearSlots
from kvasir.layers.base import Build, WeightLayer
from kvasir.layers.mesh import Role
from kvasir.quantization.base import LinearShape, MatrixPart, TensorKey


class Linear(WeightLayer):
    """y = x W^T + b over this rank's share; a ROW layer's outputs are summed over ranks. If `leaves_parts` is set, y
    may be parts that kernels.add_rms_norm still has to sum."""

    takes_packed_rows = True  # all methods that load GGUF files do
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, build: Build, prefix: str, shape: LinearShape, role: Role) -> None:
        super().__init__()
        self.prefix, self.shape, self.role, self.mesh = prefix, shape, role, build.mesh
        self.leaves_parts = False
        self.method = build.methods.linear(prefix)
        self.method.create(self, build.dtype, build.device)
        self.slots: LinearSlots | None = None
        if build.adapters is not None:
            self.slots = LinearSlots(build.adapters, shape, build.dtype, build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapts = self.slots is not None and not self.slots.step.is_plain
        if self.leaves_parts and self.bias is None and self.mesh.size == 1 and not adapts:
            return self.method.apply_parts(self, x)
        y = self.method.apply(self, x)
        if self.slots is not None and adapts:
            y = self.slots.apply_to(x, y)
        return self.mesh.all_reduce(y) if self.role is Role.ROW else y

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Compute the activation of `forward`, of a layer whose outputs are not summed over ranks."""
        assert self.role is not Role.ROW, "the sum comes before the activation"
        if self.slots is not None and not self.slots.step.is_plain:
            return kernels.ACTIVATIONS[activation](self.forward(x))
        return self.method.apply_activated(self, x, activation)

    @property
    def fuses_one_row(self) -> bool:
        """Whether `fused` computes this layer for one row."""
        return self.mesh.size == 1 and self.method.fuses_one_row(self)

    def fused(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        """Compute the layer for one row, with the operations before and after it; see kernels.fused_linear."""
        return self.method.apply_fused(self, x, **how)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return self.method.tensors(self)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.method.load(self, key, tensor)

    def process(self) -> None:
        if self.role is Role.ROW and self.mesh.rank > 0 and self.bias is not None:
            self.bias.data.zero_()  # so that the sum over ranks contains it once
        self.method.process(self)
        if self.slots is not None:
            self.slots.clear()


def column_linear(build: Build, prefix: str, inputs: int, parts: Mapping[str, int], *, bias: bool) -> Linear:
    """Several matrices over the same inputs, stacked; each rank has its share of the outputs of each."""
    own = [MatrixPart(name, outputs, build.mesh.shard(outputs, f"{prefix}.{name}")) for name, outputs in parts.items()]
    return Linear(build, prefix, LinearShape(inputs, slice(0, inputs), tuple(own), bias), Role.COLUMN)


def row_linear(build: Build, prefix: str, inputs: int, outputs: int, *, bias: bool) -> Linear:
    """One matrix; each rank has its share of the inputs."""
    whole = (MatrixPart(None, outputs, slice(0, outputs)),)
    return Linear(build, prefix, LinearShape(inputs, build.mesh.shard(inputs, prefix), whole, bias), Role.ROW)


def replicated_linear(build: Build, prefix: str, inputs: int, outputs: int, *, bias: bool) -> Linear:
    """One matrix that every rank keeps whole."""
    whole = (MatrixPart(None, outputs, slice(0, outputs)),)
    return Linear(build, prefix, LinearShape(inputs, slice(0, inputs), whole, bias), Role.REPLICATED)


def qkv_linear(
    build: Build, prefix: str, inputs: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool
) -> Linear:
    """Query, key and value projections in one. Ranks share key heads where there are fewer than ranks."""
    q = heads_part("q", heads, build.mesh.shard(heads, "num_attention_heads"), head_dim)
    kv = build.mesh.shard_heads(kv_heads, "num_key_value_heads")
    parts = (q, heads_part("k", kv_heads, kv, head_dim), heads_part("v", kv_heads, kv, head_dim))
    return Linear(build, prefix, LinearShape(inputs, slice(0, inputs), parts, bias), Role.COLUMN)


def heads_part(name: str, heads: int, own: slice, head_dim: int) -> MatrixPart:
    """Return the part of a matrix that makes the outputs of some heads."""
    return MatrixPart(name, heads * head_dim, slice(own.start * head_dim, own.stop * head_dim))
