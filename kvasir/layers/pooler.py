"""Poolers: what a pooling model makes of its hidden states. The head of each task, in float32. Worker process.

Which hidden states a pooler gets, and when, is the business of sampling/pooling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from kvasir.config.pooling import DenseSpec, PoolerSpec
from kvasir.layers.base import Build, WeightLayer

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}
_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
}


class Dense(WeightLayer):
    """See DenseSpec. The same on every rank."""

    def __init__(self, build: Build, spec: DenseSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = _parameter(build, spec.outputs, spec.inputs)
        self.bias = _parameter(build, spec.outputs) if spec.bias else None
        self.activation = _ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class DenseNorm(WeightLayer):
    """The norm after a Dense."""

    def __init__(self, build: Build, spec: DenseSpec) -> None:
        super().__init__()
        self.weight = _parameter(build, spec.outputs)
        self.bias = _parameter(build, spec.outputs) if spec.norm_bias else None
        self.eps = spec.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Pooler(nn.Module):
    """The head of one task: pooled hidden states -> vectors."""

    def __init__(self, build: Build, spec: PoolerSpec) -> None:
        super().__init__()
        self.spec = spec
        for place, layer in enumerate(spec.layers):
            self.add_module(f"dense{place}", Dense(build, layer))
            if layer.norm is not None:
                self.add_module(f"norm{place}", DenseNorm(build, layer))

    def forward(self, x: torch.Tensor, activate: torch.Tensor | None = None) -> torch.Tensor:
        """Vectors [n, size] of x [n, hidden] in float32. `activate` [n]: whether the last function is applied; None: to
        all."""
        for layer in self.children():
            x = layer(x)
        if self.spec.function == "none":
            return x
        done = _FUNCTIONS[self.spec.function](x)
        return done if activate is None else torch.where(activate[:, None], done, x)

    def names(self, path: str) -> dict[str, str]:
        """Map names of tensors in the checkpoint to paths of the layers below `path`. Tensors of a file beside the
        checkpoint are named after it."""
        found = {}
        for place, layer in enumerate(self.spec.layers):
            name = "/".join(part for part in (layer.file, layer.name) if part)
            found[name] = f"{path}.dense{place}"
            if layer.norm is not None:
                found[layer.norm] = f"{path}.norm{place}"
        return found


class Poolers(nn.ModuleDict):
    """The poolers of a model, by task. Empty: the model generates text."""

    def __init__(self, build: Build, specs: Sequence[PoolerSpec]) -> None:
        super().__init__({spec.task: Pooler(build, spec) for spec in specs})

    def names(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for task, pooler in self.items():
            assert isinstance(pooler, Pooler), "only poolers are added"
            found |= pooler.names(f"poolers.{task}")
        return found


def _parameter(build: Build, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=build.device), requires_grad=False)
