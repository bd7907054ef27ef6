"""Linear layers: one matrix or several fused, whole or split over ranks, with weights kept by any method."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kvasir import kernels
from kvasir.distributed.mesh import Role
from kvasir.layers.base import Build, WeightLayer
from kvasir.quantization.base import LinearShape, MatrixPart, TensorKey


class Linear(WeightLayer):
    """y = x W^T + b over this rank's share; a ROW layer's outputs are summed over ranks. If `leaves_parts` is set, y
    may be parts that kernels.add_rms_norm still has to sum."""

    takes_packed_rows = True  # all methods that load GGUF files do
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, build: Build, prefix: str, shape: LinearShape, role: Role) -> None:
        super().__init__()
        self.shape, self.role, self.mesh = shape, role, build.mesh
        self.leaves_parts = False
        self.method = build.methods.linear(prefix)
        self.method.create(self, build.dtype, build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaves_parts and self.bias is None and self.is_plain:
            return kernels.linear_parts(x, self.weight)
        y = self.method.apply(self, x)
        return self.mesh.all_reduce(y) if self.role is Role.ROW else y

    @property
    def is_plain(self) -> bool:
        """Whether y is the product with the matrix `weight`, plus `bias`, and nothing else."""
        return self.method.is_plain and self.mesh.size == 1

    @property
    def fuses_one_row(self) -> bool:
        """Whether kernels.fused_linear computes this layer for one row."""
        return self.is_plain and kernels.is_fit(self.weight)

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        return self.method.tensors(self)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.method.load(self, key, tensor)

    def process(self) -> None:
        if self.role is Role.ROW and self.mesh.rank > 0 and self.bias is not None:
            self.bias.data.zero_()  # so that the sum over ranks contains it once
        self.method.process(self)


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
    q = _heads("q", heads, build.mesh.shard(heads, "num_attention_heads"), head_dim)
    kv = build.mesh.shard_heads(kv_heads, "num_key_value_heads")
    parts = (q, _heads("k", kv_heads, kv, head_dim), _heads("v", kv_heads, kv, head_dim))
    return Linear(build, prefix, LinearShape(inputs, slice(0, inputs), parts, bias), Role.COLUMN)


def _heads(name: str, heads: int, own: slice, head_dim: int) -> MatrixPart:
    return MatrixPart(name, heads * head_dim, slice(own.start * head_dim, own.stop * head_dim))
