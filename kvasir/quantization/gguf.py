"""GGUF's packed rows: expanded to the model's type when they are loaded, and kept for kernels that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kvasir.gguf_file import TENSOR_TYPES
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

    def cut(self, rows: slice) -> PackedRows:
        """Some rows of a matrix, as they are."""
        data = self.data[rows]
        return PackedRows(data, self.kind, (len(data), *self.shape[1:]))

    def cut_columns(self, columns: slice) -> PackedRows | None:
        """Some columns of a matrix, as they are; None where the cut would go through a block."""
        _, block, size = next(kind for kind in TENSOR_TYPES.values() if kind[0] == self.kind)
        if columns.start % block or columns.stop % block:
            return None
        data = self.data[:, columns.start // block * size : columns.stop // block * size]
        return PackedRows(data, self.kind, (len(data), columns.stop - columns.start))

    def split(self, sizes: Sequence[int]) -> tuple[PackedRows, ...]:
        """As torch.split does it."""
        return tuple(self.cut(slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True))

    def chunk(self, count: int) -> tuple[PackedRows, ...]:
        """As torch.chunk does it, of rows that are a multiple of `count`."""
        return self.split([len(self.data) // count] * count)

    def expand(self) -> torch.Tensor:
        """The values, in float32 or in the type they have in the file."""
        if self.kind in _PLAIN:
            return self.data.view(_PLAIN[self.kind]).view(self.shape)
        if self.kind in EXPANDERS:
            return EXPANDERS[self.kind](self.data).view(self.shape)
        from gguf import GGMLQuantizationType, dequantize  # for the rarer kinds

        values = dequantize(self.data.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).view(self.shape)


def expanded(tensor: PackedRows | torch.Tensor) -> torch.Tensor:
    return tensor.expand() if isinstance(tensor, PackedRows) else tensor


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
