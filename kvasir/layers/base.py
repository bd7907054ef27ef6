"""What all layers with weights have in common: how they are built, found by kind, and filled by a loader.

Worker process; knows tensors and ranks, no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from kvasir.attention.base import AttentionBackend
from kvasir.errors import ModelError
from kvasir.layers.adapters import StepAdapters
from kvasir.layers.mesh import Mesh
from kvasir.layers.spec import RelativeBiasSpec, RopeSpec
from kvasir.quantization.base import Methods, PackedParameter, TensorKey, Unquantized, parameter
from kvasir.quantization.coded import Coded
from kvasir.quantization.coded_linear import Quantizer
from kvasir.quantization.cpu import Vocabulary


@dataclass(frozen=True)
class Build:
    """What every layer is built with. Parameters start on the meta device, where they take no memory."""

    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    methods: Methods = field(default_factory=Unquantized)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    vocabulary: Vocabulary | None = None  # how the CPU library keeps embedding and head; None: it does not
    quantize_head: Quantizer | None = None  # on other devices; None: the head stays as the checkpoint has it
    adapters: StepAdapters | None = None  # None: the model takes no adapters

    def parameter(self, *shape: int) -> nn.Parameter:
        return parameter(shape, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class DecoderBuild(Build):
    """What the layers of one decoder are built with in addition."""

    hidden_size: int
    backend: AttentionBackend
    max_positions: int  # positions are below this
    rotaries: dict[RopeSpec, nn.Module] = field(default_factory=dict)  # tables made so far; see rope.rotary_for
    biases: dict[RelativeBiasSpec, nn.Module] = field(default_factory=dict)  # the same; see attention.relative_bias_for


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
    takes_integers = False  # whether what it holds is no weights but numbers of something, such as of tokens

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
    """The memory of parameters, buffers and quantized matrices, each address counted once."""
    tensors = [tensor for module in model.modules() for _, held in weights_of(module) for tensor in held]
    # A tensor in oneDNN's own layout has no address.
    places = {id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.element_size() * tensor.numel() for tensor in places.values())


def weights_of(module: nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """What a module itself holds, and how: quantized matrices, packed matrices, other parameters and buffers."""
    state = module.__dict__
    coded = state.get("coded") or ()
    parts = [*(coded if isinstance(coded, tuple) else (coded,)), *state.get("stacks", {}).values()]
    for part in parts:
        if isinstance(part, Coded):
            yield str(part), list(part.tensors().values())
        elif isinstance(part, torch.Tensor):
            yield _name(part), [part]
        else:
            yield str(part.layout.format), [part.memory]
    matrix = state.get("matrix")
    if matrix is not None:
        yield str(matrix.layout.format), [matrix.memory]
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.numel() and not isinstance(tensor, PackedParameter):
            yield _name(tensor), [tensor]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe_weights(model: nn.Module) -> str:
    """How many matrices are held how, and in how much memory: "8 as bfloat16 (1.0 MiB)"."""
    counts: dict[str, list[int]] = {}
    for module in model.modules():
        if isinstance(module, WeightLayer):
            for how, tensors in weights_of(module):
                if any(tensor.dim() > 1 or tensor.dtype == torch.uint8 for tensor in tensors):
                    entry = counts.setdefault(how, [0, 0])
                    entry[0] += 1
                    entry[1] += sum(tensor.element_size() * tensor.numel() for tensor in tensors)
    return ", ".join(f"{count} as {how} ({size / 2**20:.1f} MiB)" for how, (count, size) in counts.items())
