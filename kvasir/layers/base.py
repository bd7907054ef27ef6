"""What all layers with weights have in common: how they are built, and how a loader fills them.

Worker process; knows tensors and ranks, no model and no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from kvasir.distributed.mesh import Mesh
from kvasir.quantization.base import TensorKey, parameter
from kvasir.quantization.cpu import Vocabulary
from kvasir.quantization.methods import Methods, Unquantized


@dataclass(frozen=True)
class Build:
    """What every layer is built with. Parameters start on the meta device, where they cost nothing."""

    dtype: torch.dtype
    mesh: Mesh = field(default_factory=Mesh)
    methods: Methods = field(default_factory=Unquantized)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    vocabulary: Vocabulary | None = None  # how the CPU library keeps embedding and head; None: it does not

    def parameter(self, *shape: int) -> nn.Parameter:
        return parameter(shape, self.dtype, self.device)


class WeightLayer(nn.Module):
    """A layer that a checkpoint's tensors go into. By default each parameter is one tensor, whole on every rank."""

    takes_packed_rows = False  # whether `load` knows a GGUF file's matrices as they are

    def tensors(self) -> Mapping[TensorKey, tuple[int, ...]]:
        """The tensors a checkpoint must have for this layer, with their shapes there."""
        return {(name, None): tuple(value.shape) for name, value in self.named_parameters(recurse=False)}

    def load(self, key: TensorKey, tensor: torch.Tensor) -> None:
        """Copy one of `tensors()` to its place, with its type changed to the layer's."""
        self.get_parameter(key[0]).data.copy_(tensor)

    def process(self) -> None:
        """Called once on the device, after everything is loaded."""
        return None
