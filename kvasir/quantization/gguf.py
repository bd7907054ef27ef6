"""GGUF's packed rows: expanded to the model's type when they are loaded, and kept for kernels that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvasir.quantization.base import LinearLayer, LinearMethod, TensorKey, UnquantizedLinear
from kvasir.quantization.gguf_blocks import EXPANDERS
from kvasir.quantization.methods import Unquantized

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PackedRows:
    """A tensor as the file has it. `data` is a view of the mapped file: it takes no memory until it is read."""

    data: torch.Tensor  # [rows, bytes of a row] uint8
    kind: str  # "Q4_1"
    shape: tuple[int, ...]

    def expand(self) -> torch.Tensor:
        """The values, in float32 or in the type they have in the file."""
        if self.kind in _PLAIN:
            return self.data.view(_PLAIN[self.kind]).view(self.shape)
        if self.kind in EXPANDERS:
            return EXPANDERS[self.kind](self.data).view(self.shape)
        from gguf import GGMLQuantizationType, dequantize  # for the rarer kinds

        values = dequantize(self.data.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).view(self.shape)


class GGUFLinear(UnquantizedLinear):
    """Expands what it loads. The packed rows of each part are `layer.packed[part]`, whole, for all ranks."""

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if isinstance(tensor, PackedRows):
            packed: dict[str | None, PackedRows] = layer.__dict__.setdefault("packed", {})
            packed[key[1]] = tensor
            tensor = tensor.expand()
        super().load(layer, key, tensor)


class GGUFMethods(Unquantized):
    """Of a model that comes from a GGUF file."""

    def linear(self, prefix: str) -> LinearMethod:
        return GGUFLinear()
