"""Normalisation. A norm also adds the residual, since that is where the fused kernel does it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvasir import kernels
from kvasir.distributed.mesh import Mesh
from kvasir.layers.base import Build, WeightLayer
from kvasir.quantization.base import TensorKey


class RMSNorm(WeightLayer):
    """Root-mean-square norm with a gain."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum, which is the next residual."""
        if residual is None:
            return self(x), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """One whose gain the checkpoint has less one. It is kept in float32: one plus a small number needs the digits."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__(build, size, eps)
        self.weight = nn.Parameter(self.weight.data.float(), requires_grad=False)

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        self.weight.data.copy_(tensor).add_(1.0)


class LayerNorm(WeightLayer):
    """Mean and variance normalised, with a gain, and with a bias if `bias`."""

    def __init__(self, build: Build, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = build.parameter(size)
        self.bias = build.parameter(size) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        return self(residual), residual


class NoNorm(nn.Module):
    """Where a layer has none: the sum itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        return residual, residual


Norm = RMSNorm | LayerNorm | NoNorm


class SplitRMSNorm(WeightLayer):
    """An RMS norm over a vector of which each rank has the part `own`."""

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


def make_norm(build: Build, kind: str, size: int, eps: float) -> RMSNorm | LayerNorm:
    """`kind`: see DecoderSpec.norm."""
    if kind.startswith("layer"):
        return LayerNorm(build, size, eps, bias=kind == "layer")
    return (OffsetRMSNorm if kind == "rms+1" else RMSNorm)(build, size, eps)
