"""Packed rows of GGUF files: how to cut them, expand them, and read them as codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvasir.quantization.coded import Coded, Coding, power_of_two
from kvasir.quantization.gguf_file import TENSOR_TYPES

# Bytes of a block, and where its scales and offsets of float16 are.
_SCALES = {
    "Q4_0": (18, (0,)),
    "Q4_1": (20, (0, 2)),
    "Q5_0": (22, (0,)),
    "Q5_1": (24, (0, 2)),
    "Q8_0": (34, (0,)),
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}
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

    @property
    def is_plain(self) -> bool:
        return self.kind in _PLAIN

    def scales(self) -> Iterator[torch.Tensor]:
        """All floating-point numbers of the tensor: a packed one's scales, or the values where there are no scales."""
        if self.kind not in _SCALES:
            yield self.expand()
            return
        size, places = _SCALES[self.kind]
        blocks = _blocks(self.data, size)
        for place in places:
            yield blocks[:, place : place + 2].contiguous().view(torch.float16)

    def coded(self) -> Coded | None:
        """Return the matrix as codes, with scales in float32; None if its type is not made of codes and scales."""
        return CODES[self.kind](self.data.contiguous()) if self.kind in CODES and len(self.shape) == 2 else None

    def expand(self) -> torch.Tensor:
        """The values, in float32 or in the file's own dtype."""
        if self.kind in _PLAIN:
            return self.data.view(_PLAIN[self.kind]).view(self.shape)
        if self.kind in EXPANDERS:
            return EXPANDERS[self.kind](self.data).view(self.shape)
        from gguf import GGMLQuantizationType, dequantize  # for the rarer kinds

        values = dequantize(self.data.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).view(self.shape)


FileMatrix = PackedRows | Coded  # a matrix as a checkpoint has it, quantized


def expanded(tensor: FileMatrix | torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor.expand()


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
    values = torch.empty(packed.shape[0], _BLOCK, dtype=torch.uint8, device=packed.device)
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


# ---------------------------------------------------------------- codes


def _made(
    rows: torch.Tensor, numbers: torch.Tensor, coding: Coding, scale: torch.Tensor, minimum: torch.Tensor | None = None
) -> Coded:
    """Make a matrix from the numbers, scales and minima of its blocks."""
    count = len(rows)
    lowest = None if minimum is None else minimum.reshape(count, -1)
    return Coded(numbers.reshape(count, -1), scale.reshape(count, -1), coding, minimum=lowest)


def _read_q4_0(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 18)
    return _made(rows, _nibbles(blocks[:, 2:]), Coding("u4", 32, 8), _half(blocks, 0))


def _read_q4_1(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 20)
    return _made(rows, _nibbles(blocks[:, 4:]), Coding("u4", 32), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 4] bytes -> [blocks, 32]: bit i, moved to the fifth place."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.reshape(len(packed), _BLOCK) << 4


def _read_q5_0(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 22)
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _made(rows, numbers, Coding("u6", 32, 16), _half(blocks, 0))


def _read_q5_1(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 24)
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _made(rows, numbers, Coding("u6", 32), _half(blocks, 0), _half(blocks, 2))


def _read_q8_0(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 34)
    return _made(rows, blocks[:, 2:], Coding("i8", 32), _half(blocks, 0))


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 64] bytes -> [blocks, 256]: four planes of 32 numbers for each 32 bytes."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(len(packed), 256)


def _read_q2_k(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 84)
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    scale, minimum = _half(blocks, 80) * scales.float(), -(_half(blocks, 82) * minima.float())
    return _made(rows, _two_bits(blocks[:, 16:80]), Coding("u4", 16), scale, minimum)


def _read_q3_k(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 110)
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None]
    high = ((blocks[:, None, :32] >> shifts) & 1).reshape(len(blocks), 256) << 2
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
    two = ((packed[:, None, 8:] >> (2 * shifts[:4])) & 3).reshape(len(blocks), 16)
    scale = _half(blocks, 108) * ((low | two << 4).float() - 32)
    return _made(rows, _two_bits(blocks[:, 32:96]) | high, Coding("u4", 16, 4), scale)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight groups, whose six bits are in 12 bytes."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6) << 4), dim=1)
    minima = torch.cat((second & 63, last >> 4 | (second >> 6) << 4), dim=1)
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minima.float())


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] bytes -> [blocks, 256]: the low halves of 32 bytes, then their high halves."""
    runs = packed.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).reshape(len(packed), 256)


def _read_q4_k(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 144)
    return _made(rows, _k_nibbles(blocks[:, 16:]), Coding("u4", 32), *_k_scales(blocks))


def _read_q5_k(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 176)
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)[:, None]
    high = ((blocks[:, None, 16:48] >> shifts) & 1).reshape(len(blocks), 256) << 4
    return _made(rows, _k_nibbles(blocks[:, 48:]) | high, Coding("u6", 32), *_k_scales(blocks))


def _read_q6_k(rows: torch.Tensor) -> Coded:
    blocks = _blocks(rows, 210)
    runs = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((runs & 15, runs >> 4), dim=2).reshape(len(blocks), 256)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _made(rows, low | _two_bits(blocks[:, 128:192]) << 4, Coding("u6", 16, 32), scale)


def _read_mxfp4(rows: torch.Tensor) -> Coded:
    """A block begins with the exponent of its scale; GGUF's own levels are doubled, and its scales halved."""
    blocks = _blocks(rows, 17)
    return _made(rows, _nibbles(blocks[:, 1:]), Coding("e2m1", 32), power_of_two(blocks[:, :1]))


CODES: dict[str, Callable[[torch.Tensor], Coded]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q8_0": _read_q8_0,
    "Q2_K": _read_q2_k,
    "Q3_K": _read_q3_k,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
    "MXFP4": _read_mxfp4,
}
