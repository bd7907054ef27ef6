"""Normalisation. A norm also adds the residual, because the fused kernel does both in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from kvasir import kernels
from kvasir.layers.base import Build, Kinds, WeightLayer
from kvasir.layers.mesh import Mesh
from kvasir.layers.spec import LayerNormSpec, NormSpec, RMSNormSpec
from kvasir.quantization.base import TensorKey


class Norm(WeightLayer, ABC):
    """What a decoder asks of any kind of norm."""

    is_identity = False
    sums_parts = False  # whether `add` takes x as the parts of kernels.linear_parts

    @property
    def fused_options(self) -> dict[str, Any] | None:
        """The arguments by which kernels.fused_linear computes the norm before its product; None: it cannot."""
        return None

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x, over its last dimension."""

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum, which is the next residual."""
        residual = x if residual is None else x + residual
        return self(residual), residual

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual alone, for layers whose residual is the norm's result."""
        normed: torch.Tensor = self(x + residual)
        return normed


NORMS: Kinds[Norm] = Kinds("norm")  # built from (build, spec, size)


def make_norm(build: Build, spec: NormSpec | None, size: int) -> Norm:
    return NoNorm() if spec is None else NORMS.make(build, spec, size)


class RMSNorm(Norm):
    """Root-mean-square norm with a gain."""

    sums_parts = True

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    @property
    def fused_options(self) -> dict[str, Any] | None:
        return {"gain": self.weight, "eps": self.eps}

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self(x), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Its gain is one more than what the checkpoint holds, and kept in float32: bfloat16 would round the sum."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build, size, eps)
        self.weight = nn.Parameter(self.weight.data.float(), requires_grad=False)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor).add_(1.0)


class BareRMSNorm(RMSNorm):
    """A norm without a gain: its gain is one, and no checkpoint has it."""

    def tensors(self) -> dict[TensorKey, tuple[int, ...]]:
        return {}

    def process(self) -> None:
        self.weight.data.fill_(1.0)


@NORMS.register(RMSNormSpec)
def _make_rms_norm(build: Build, spec: RMSNormSpec, size: int) -> RMSNorm:
    if not spec.has_gain:
        return BareRMSNorm(build, size, spec.eps)
    return (OffsetRMSNorm if spec.plus_one else RMSNorm)(build, size, spec.eps)


@NORMS.register(LayerNormSpec)
class LayerNorm(Norm):
    """Mean and variance normalised, with a gain and perhaps a bias."""

    def __init__(self, build: Build, spec: LayerNormSpec, size: int) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.bias = build.parameter(size) if spec.bias else None
        self.eps = spec.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self(x), x
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)


class NoNorm(Norm):
    """Stands where a layer has no norm: x as it is."""

    is_identity = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SplitRMSNorm(WeightLayer):
    """An RMS norm over one vector that is split over the ranks; `own` is this rank's part."""

    def __init__(self, build: Build, size: int, own: slice, eps: float) -> None:
        super().__init__()
        self.mesh: Mesh = build.mesh
        self.size, self.own, self.eps = size, own, eps
        self.weight = build.parameter(own.stop - own.start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh.size == 1:
            return kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        wide = x.float()
        squares = self.mesh.all_reduce(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype) * self.weight

    def tensors(self) -> dict[TensorKey, tuple[int, ...]]:
        return {("weight", None): (self.size,)}

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor[self.own])
