"""What all layers with weights have in common: how they are built, found by kind, and filled by a loader.

Worker process; knows tensors and ranks, no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend
from kvasir.distributed.mesh import Mesh
from kvasir.errors import ModelError
from kvasir.layers.spec import RopeSpec
from kvasir.quantization.base import Methods, TensorKey, Unquantized, parameter
from kvasir.quantization.cpu import Vocabulary


@dataclass(frozen=True)
class Build:
    """What every layer is built with. Parameters start on the meta device, where they take no memory."""

    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    methods: Methods = field(default_factory=Unquantized)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    vocabulary: Vocabulary | None = None  # how the CPU library keeps embedding and head; None: it does not

    def parameter(self, *shape: int) -> nn.Parameter:
        return parameter(shape, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class DecoderBuild(Build):
    """What the layers of one decoder are built with in addition."""

    hidden_size: int
    backend: AttentionBackend
    max_positions: int  # positions are below this
    rotaries: dict[RopeSpec, nn.Module] = field(default_factory=dict)  # tables made so far; see rope.rotary_for


Layer_co = TypeVar("Layer_co", bound=nn.Module, covariant=True)
Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


class Kinds(Generic[Layer_co]):
    """The kinds of one part of a decoder: for each class of spec the class or function that builds its module."""

    def __init__(self, part: str) -> None:
        self.part = part
        self._builders: dict[type, Callable[..., Any]] = {}

    def register(self, spec: type) -> Callable[[Builder], Builder]:
        """A decorator for what builds the module of a spec of this class. It is called as `make` is."""

        def add(builder: Builder) -> Builder:
            self._builders[spec] = builder
            return builder

        return add

    def make(self, build: Build, spec: object, *place: object) -> Layer_co:
        """The module that `spec` describes; `place` is its prefix in the model, or a norm's size."""
        builder = self._builders.get(type(spec))
        if builder is None:
            raise ModelError(f"No {self.part} is registered for {type(spec).__name__}.")
        made: Layer_co = builder(build, spec, *place)
        return made


class WeightLayer(nn.Module):
    """A layer that a checkpoint's tensors go into. By default each parameter is one tensor, whole on every rank."""

    takes_packed_rows = False  # whether `load` takes matrices packed as in a GGUF file

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for this layer, with their shapes there."""
        return {(name, None): tuple(value.shape) for name, value in self.named_parameters(recurse=False)}

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy one of `tensors()` to its place and convert it to the layer's dtype."""
        self.get_parameter(key[0]).data.copy_(tensor)

    def process(self) -> None:
        """Called once on the device, after everything is loaded."""
        return None


def weight_bytes(model: nn.Module) -> int:
    """The memory of parameters, buffers and packed matrices, each address counted once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    packed = [getattr(module, "matrix", None) for module in model.modules()]
    tensors += [matrix.memory for matrix in packed if matrix is not None]
    # A tensor in oneDNN's own layout has no address.
    places = {id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.element_size() * tensor.numel() for tensor in places.values())
