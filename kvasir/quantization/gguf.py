"""Packed rows of GGUF files, how to cut and expand them, and the method that expands them while loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from kvasir.quantization.base import LinearLayer, LinearMethod, TensorKey, Unquantized, UnquantizedLinear
from kvasir.quantization.gguf_file import TENSOR_TYPES

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PackedRows:
    """A tensor as it is in the file. `data` is a view of the mapped file, which takes no memory until it is read."""

    data: torch.Tensor  # [rows, bytes of a row] uint8
    kind: str  # "Q4_1"
    shape: tuple[int, ...]

    def cut(self, rows: slice) -> PackedRows:
        """Some rows of a matrix, still packed."""
        data = self.data[rows]
        return PackedRows(data, self.kind, (len(data), *self.shape[1:]))

    def cut_columns(self, columns: slice) -> PackedRows | None:
        """Some columns of a matrix, still packed; None if the cut would go through a block."""
        _, block, size = next(kind for kind in TENSOR_TYPES.values() if kind[0] == self.kind)
        if columns.start % block or columns.stop % block:
            return None
        data = self.data[:, columns.start // block * size : columns.stop // block * size]
        return PackedRows(data, self.kind, (len(data), columns.stop - columns.start))

    def split(self, sizes: Sequence[int]) -> tuple[PackedRows, ...]:
        """Like torch.split."""
        return tuple(self.cut(slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True))

    def chunk(self, count: int) -> tuple[PackedRows, ...]:
        """Like torch.chunk, for a number of rows that is a multiple of `count`."""
        return self.split([len(self.data) // count] * count)

    def expand(self) -> torch.Tensor:
        """The values, in float32 or in the file's own dtype."""
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
    """Expands what it loads. `layer.packed[part]` keeps the packed rows of each part, whole on every rank."""

    def load(self, layer: LinearLayer, key: TensorKey, tensor: Any) -> None:
        if isinstance(tensor, PackedRows):
            packed: dict[str | None, PackedRows] = layer.__dict__.setdefault("packed", {})
            packed[key[1]] = tensor
            tensor = tensor.expand()
        super().load(layer, key, tensor)


class GGUFMethods(Unquantized):
    """The methods of a model from a GGUF file that the CPU library does not run."""

    def linear(self, prefix: str) -> LinearMethod:
        return GGUFLinear()


# ---------------------------------------------------------------- expanding
# The gguf package expands every kind, but sixteen rows at a time, which takes most of a small model's start-up. These
# functions expand the most common kinds all at once, with bit for bit the same values.

_BLOCK = 32  # values that share a scale


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, bytes of a row] -> [blocks, bytes of a block]"""
    return rows.reshape(-1, size)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves of all bytes, then the high ones."""
    values = torch.empty(packed.shape[0], _BLOCK, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=values[:, : _BLOCK // 2])
    torch.bitwise_right_shift(packed, 4, out=values[:, _BLOCK // 2 :])
    return values


def _q4_0(rows: torch.Tensor) -> torch.Tensor:
    blocks = _blocks(rows, 18)
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(rows: torch.Tensor) -> torch.Tensor:
    blocks = _blocks(rows, 20)
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(rows: torch.Tensor) -> torch.Tensor:
    blocks = _blocks(rows, 34)
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


EXPANDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
