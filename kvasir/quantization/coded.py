"""A quantized matrix, whatever format it came in: codes, scales and, for some, minima. Pure tensors, on any device.

    value[n, k] = level(code[n, k]) * scale[n, g] * row[n] + minimum[n, g],    g = k // group

where level(code) is the number that a code stands for, less `offset`. Per-tensor and global scales are written out for
each row, so that matrices with different ones can be stacked exactly.

Plain matrices become such ones while they are loaded (`QUANTIZERS`), and `kvasir quantize` writes the same: 8-bit
floats, 8-bit integers, 4-bit integers with searched scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch

from kvasir.errors import ModelError
from kvasir.kernels.reference import LEVELS

BITS = {"u4": 4, "u6": 6, "i8": 8, "e4m3": 8, "e2m1": 4, "fp4": 4, "nf4": 4}
_MOST_TILE, _LEAST_TILE = 128, 16
MOST_FLOAT = 448.0  # of e4m3
GROUP = 128  # inputs that share a scale in int4
BLOCK = 128  # outputs and inputs that share one in fp8_block
_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.72)  # of a group's range, which are tried
Zeros = Literal["any", "own", "8"]
_AT_ONCE = 1 << 25  # numbers that the search holds in float32 at a time


@dataclass(frozen=True)
class Coding:
    """How codes are to be read.

    kind    u4, u6: whole numbers; i8: a signed byte; e4m3: an 8-bit float; e2m1, fp4, nf4: 4-bit floats (LEVELS)
    group   inputs that share a scale; all of them where that is the matrix's width
    offset  of u4 and u6: the number that means zero
    inputs  e4m3: the checkpoint's inputs are rounded to 8-bit floats as well, so that a kernel may do so
    tile    0: a byte for each code. Otherwise bytes hold two codes of 4 bits: in each tile of so many inputs, byte j
            has input j in its low half and input tile / 2 + j in its high half
    """

    kind: str
    group: int
    offset: int = 0
    tile: int = 0
    inputs: str = ""


@dataclass(frozen=True)
class Coded:
    """A matrix [outputs, inputs] of codes."""

    codes: torch.Tensor  # uint8 [outputs, inputs], or [outputs, inputs / 2] where the coding has tiles
    scale: torch.Tensor  # [outputs, inputs / group], of any floating-point type
    coding: Coding
    minimum: torch.Tensor | None = None  # like scale
    row: torch.Tensor | None = None  # [outputs]; in float64 as read, so that dividing by a factor rounds once
    order: torch.Tensor | None = None  # int64 [inputs]: column j is that of input order[j]
    column: torch.Tensor | None = None  # [inputs], in the order of the inputs: they are multiplied by it first

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        groups = inputs // self.coding.group if self.coding.group else 0
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes are {self.codes.dtype} {list(self.codes.shape)}, not bytes of a matrix")
        if groups * self.coding.group != inputs or tuple(self.scale.shape) != (outputs, groups):
            raise ValueError(f"{list(self.scale.shape)} scales for {outputs}x{inputs} in groups of {self.coding.group}")
        if self.minimum is not None and (self.minimum.shape != self.scale.shape or self.row is not None):
            raise ValueError("minima must be as many as scales, and go with no factors of rows")
        for name, size in (("row", outputs), ("order", inputs), ("column", inputs)):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (size,):
                raise ValueError(f"{name} is {list(value.shape)}, not [{size}]")

    # ------------------------------------------------------------ as PackedRows

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.codes.shape
        return outputs, width * 2 if self.coding.tile else width

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "coding"}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device) -> Coded:
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def cut(self, rows: slice) -> Coded:
        """Return some rows."""
        by_row = {name: getattr(self, name) for name in ("codes", "scale", "minimum", "row")}
        return replace(self, **{name: value[rows] for name, value in by_row.items() if value is not None})

    def split(self, sizes: Sequence[int]) -> tuple[Coded, ...]:
        """Like torch.split."""
        return tuple(self.cut(slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True))

    def chunk(self, count: int) -> tuple[Coded, ...]:
        """Like torch.chunk, for a number of rows that is a multiple of `count`."""
        return self.split([self.shape[0] // count] * count)

    def take(self, rows: torch.Tensor) -> Coded:
        """Return these rows, in this order."""
        by_row = {name: getattr(self, name) for name in ("codes", "scale", "minimum", "row")}
        return replace(self, **{name: value[rows] for name, value in by_row.items() if value is not None})

    def cut_columns(self, columns: slice) -> Coded | None:
        """Return some columns; None if the cut would go through a group or a tile, or columns are in an order of their
        own."""
        inputs = self.shape[1]
        if (columns.start, columns.stop) == (0, inputs):
            return self
        group, tile = self.coding.group, self.coding.tile
        whole_row = group == inputs
        step = 1 if whole_row else group
        if self.order is not None or any(at % step or (tile and at % tile) for at in (columns.start, columns.stop)):
            return None
        codes = self.codes[:, columns.start // 2 : columns.stop // 2] if tile else self.codes[:, columns]
        width = columns.stop - columns.start
        groups = slice(None) if whole_row else slice(columns.start // group, columns.stop // group)
        return replace(
            self,
            codes=codes,
            scale=self.scale[:, groups],
            minimum=None if self.minimum is None else self.minimum[:, groups],
            column=None if self.column is None else self.column[columns],
            coding=replace(self.coding, group=width if whole_row else group),
        )

    def scales(self) -> Iterator[torch.Tensor]:
        """All its floating-point numbers, which must be finite."""
        for name, tensor in self.tensors().items():
            if name != "codes" and tensor.is_floating_point():
                yield tensor
        if self.coding.kind == "e4m3":  # has a NaN, and no infinity
            yield torch.where(((self.codes & 127) == 127).any(), torch.nan, 0.0).reshape(1)

    # ------------------------------------------------------------ values

    def numbers(self) -> torch.Tensor:
        """A byte for each code, [outputs, inputs]."""
        tile = self.coding.tile
        if not tile:
            return self.codes
        tiles = self.codes.view(self.shape[0], -1, tile // 2)
        return torch.stack((tiles & 15, tiles >> 4), dim=2).view(self.shape)

    def levels(self) -> torch.Tensor:
        """What the codes stand for, less the offset, in float32."""
        numbers, kind = self.numbers(), self.coding.kind
        if kind == "e4m3":
            return numbers.contiguous().view(torch.float8_e4m3fn).float()
        if kind == "i8":
            return numbers.contiguous().view(torch.int8).float()
        if kind in LEVELS:
            return _levels(kind, numbers.device)[numbers.int()]
        return numbers.float().sub_(self.coding.offset)

    def full_scale(self) -> torch.Tensor:
        """The scales in float32, with the rows' factors."""
        scale = self.scale.float()
        return scale if self.row is None else (scale.to(self.row.dtype) * self.row[:, None]).float()

    def expand(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, in the order of the inputs: one product and one sum in float32, then rounded to dtype."""
        outputs, inputs = self.shape
        values = self.levels().view(outputs, -1, self.coding.group)
        values.mul_(self.full_scale()[:, :, None])
        if self.minimum is not None:
            values.add_(self.minimum.float()[:, :, None])
        matrix = values.view(outputs, inputs)
        if self.order is not None:
            matrix = torch.empty_like(matrix).index_copy_(1, self.order, matrix)
        if self.column is not None:
            matrix = matrix * self.column.float()
        return matrix.to(dtype)

    # ------------------------------------------------------------ other forms of the same values

    def packed(self) -> Coded:
        """With two 4-bit codes in a byte, where the width allows it. See Coding.tile."""
        if BITS[self.coding.kind] != 4 or self.coding.tile:
            return self
        tile, inputs = _MOST_TILE, self.shape[1]
        while tile >= _LEAST_TILE and (self.coding.group % tile or inputs % tile):
            tile //= 2
        if tile < _LEAST_TILE:
            return self
        tiles = self.codes.view(self.shape[0], -1, 2, tile // 2)
        codes = (tiles[:, :, 0] | (tiles[:, :, 1] << 4)).view(self.shape[0], -1)
        return replace(self, codes=codes, coding=replace(self.coding, tile=tile))

    def centered(self) -> Coded:
        """With numbers that are counted from the middle of their range, where there are minima. Those are then small
        beside the values, and lose little where kernels round them to bfloat16."""
        middle = {"u4": 8, "u6": 32}.get(self.coding.kind)
        if middle is None or self.minimum is None or self.coding.offset == middle:
            return self
        minimum = self.minimum.float() + (middle - self.coding.offset) * self.scale.float()
        return replace(self, coding=replace(self.coding, offset=middle), minimum=minimum)

    def narrowed(self, *, rounds: bool = False) -> Coded:
        """With scales and minima in 16 bits, where that changes no value; with `rounds` those of groups below 64 in any
        case, to the nearest float16: a scale for 32 codes would otherwise take as much memory as eight of them."""
        lossy = rounds and self.coding.group < 64
        return replace(
            self,
            scale=_narrow(self.scale, lossy),
            minimum=None if self.minimum is None else _narrow(self.minimum, lossy),
            row=self.row.float() if self.row is not None and rounds else self.row,
        )

    def __str__(self) -> str:
        what = f"{self.coding.kind} " + ("by row" if self.scale.shape[1] == 1 else f"in groups of {self.coding.group}")
        return what + (" with minima" if self.minimum is not None else "")


@dataclass(frozen=True)
class RandomCoding:
    """Coding of a matrix of random weights."""

    coding: Coding
    has_minimum: bool = False
    has_row: bool = False

    def make(self, outputs: int, inputs: int, device: torch.device, generator: torch.Generator | None = None) -> Coded:
        """Random codes with one scale, such that values have a mean of about zero and a deviation of 0.02."""
        coding = replace(self.coding, group=self.coding.group or inputs)
        most = 128 if coding.kind == "e4m3" else 1 << BITS[coding.kind]  # positive 8-bit floats below NaN, then signed
        codes = torch.randint(0, most, (outputs, inputs), dtype=torch.uint8, device=device, generator=generator)
        if coding.kind == "e4m3":
            codes = (codes & 63) | ((codes & 64) << 1)  # from 0 to below 2
        whole = coding.kind in ("u4", "u6")
        middle = (most - 1) / 2 if whole else 0.0
        levels = levels_of(coding, codes[:1].clone()).float()
        scale = 0.02 / max(float((levels - (middle - coding.offset)).square().mean().sqrt()), 1e-6)
        shape = (outputs, inputs // coding.group)
        scales = torch.full(shape, scale, device=device)
        minimum = torch.full(shape, -scale * (middle - coding.offset), device=device) if self.has_minimum else None
        row = torch.ones(outputs, device=device) if self.has_row else None
        return Coded(codes, scales, coding, minimum=minimum, row=row)


@cache
def _levels(kind: str, device: torch.device) -> torch.Tensor:
    """Made once: a CUDA graph, which may look up embeddings, cannot be captured while the host copies to the device."""
    return torch.tensor(LEVELS[kind], dtype=torch.float32, device=device)


def levels_of(coding: Coding, codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers that some codes of a coding stand for."""
    return Coded(codes, torch.ones(len(codes), 1, device=codes.device), replace(coding, group=codes.shape[1])).levels()


def _narrow(values: torch.Tensor, lossy: bool) -> torch.Tensor:
    if values.dtype != torch.float32:
        return values
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    half = values.to(torch.float16)
    return half if lossy and bool(half.isfinite().all()) else values


def stacked(parts: Sequence[Coded]) -> Coded | None:
    """Stack matrices with the same inputs into one; None if their codings or orders differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if part.coding != first.coding or part.shape[1] != first.shape[1]:
            return None
        if part.tensors().keys() != first.tensors().keys():
            return None
        for name in ("order", "column"):
            ours, theirs = getattr(first, name), getattr(part, name)
            if ours is not None and not torch.equal(ours, theirs):
                return None
    joined: dict[str, Any] = {}
    for name in ("codes", "scale", "minimum", "row"):
        if getattr(first, name) is not None:
            joined[name] = torch.cat(_alike([getattr(part, name) for part in parts]))
    return replace(first, **joined)


def _alike(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors if len({tensor.dtype for tensor in tensors}) == 1 else [tensor.float() for tensor in tensors]


# ---------------------------------------------------------------- for those who read formats


def whole_numbers(
    numbers: torch.Tensor,  # uint8 [outputs, inputs]
    scale: torch.Tensor,  # [outputs, groups]
    zero: torch.Tensor | int,  # [outputs, groups] of integers, or one for all
    bits: int,
    order: torch.Tensor | None = None,
) -> Coded:
    """The matrix (number - zero) * scale. A zero that all groups share becomes an offset, which takes no memory."""
    if isinstance(zero, torch.Tensor) and bool((zero == zero.flatten()[0]).all()):
        zero = int(zero.flatten()[0])
    group = numbers.shape[1] // scale.shape[1]
    minimum = None
    if bits <= 4:
        kind, offset = "u4", zero if isinstance(zero, int) else 0
    else:
        kind, offset = "i8", 0
        numbers, zero = numbers ^ 128, zero - 128
        if isinstance(zero, int) and zero:
            zero = torch.full(scale.shape, zero, device=scale.device)
    if isinstance(zero, torch.Tensor):
        minimum = -(zero.float() * scale.float())
    return Coded(numbers.contiguous(), scale.contiguous(), Coding(kind, group, offset), minimum=minimum, order=order)


def unpack(words: torch.Tensor, bits: int, count: int, *, dense: bool = True) -> torch.Tensor:
    """The first `count` numbers of so many bits along the last dimension of int32 words, lowest bits first, as bytes.
    `dense`: numbers may cross from a word to the next; otherwise a word's last bits stay empty."""
    *outer, width = words.shape
    if 32 % bits == 0 or not dense:
        shifts = torch.arange(0, 32 - bits + 1, bits, device=words.device, dtype=torch.int32)
        numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
        return numbers.to(torch.uint8).view(*outer, -1)[..., :count]
    words = torch.nn.functional.pad(words, (0, -width % bits))  # to whole runs of 32 numbers
    width = words.shape[-1]
    runs = (words.to(torch.int64) & 0xFFFFFFFF).view(*outer, width // bits, bits)
    found = []
    for number in range(32):
        word, shift = divmod(number * bits, 32)
        value = runs[..., word] >> shift
        if shift + bits > 32:
            value = value | (runs[..., word + 1] << (32 - shift))
        found.append((value & ((1 << bits) - 1)).to(torch.uint8))
    return torch.stack(found, dim=-1).view(*outer, -1)[..., :count]


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127). The byte 255 means no number; it becomes infinity, which is refused as well."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # those of a float32; the least is subnormal
    return bits.view(torch.float32)


def column_order(groups: torch.Tensor, group: int, what: str) -> torch.Tensor | None:
    """Return the order that brings each group's columns together, given every column's group; None if they are
    together."""
    groups = groups.long()
    inputs = len(groups)
    straight = torch.arange(inputs, device=groups.device) // group
    if torch.equal(groups, straight):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], straight):
        raise ModelError(f"{what} does not give each group {group} of the {inputs} inputs; download it again.")
    return order


def fp8(weight: torch.Tensor, scale_type: torch.dtype = torch.float32) -> Coded:
    """A scale for each row; kernels may round inputs to 8-bit floats too."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / MOST_FLOAT).clamp_min(1e-12).to(scale_type)
    codes = (wide / scale.float()).clamp_(-MOST_FLOAT, MOST_FLOAT).to(torch.float8_e4m3fn).view(torch.uint8)
    return Coded(codes, scale, Coding("e4m3", weight.shape[1], inputs="e4m3"))


def fp8_block(weight: torch.Tensor) -> Coded:
    """A scale for each block of 128x128."""
    outputs, inputs = weight.shape
    if inputs % BLOCK:
        return fp8(weight)
    wide = weight.float()
    tall = torch.nn.functional.pad(wide.view(outputs, -1, BLOCK).abs().amax(2), (0, 0, 0, -outputs % BLOCK))
    most = tall.view(-1, BLOCK, inputs // BLOCK).amax(1).repeat_interleave(BLOCK, 0)[:outputs]
    scale = (most / MOST_FLOAT).clamp_min(1e-12)
    codes = (wide.view(outputs, -1, BLOCK) / scale[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return Coded(codes.view(outputs, inputs), scale, Coding("e4m3", BLOCK))


def int8(weight: torch.Tensor, scale_type: torch.dtype = torch.float32) -> Coded:
    """A scale for each row."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12).to(scale_type)
    codes = torch.round(wide / scale.float()).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return Coded(codes, scale, Coding("i8", weight.shape[1]))


def int4(weight: torch.Tensor, group: int = GROUP, *, zeros: Zeros = "any") -> Coded:
    """Groups of 128 inputs, or of the largest power of two below that divides them. Each has the scale and minimum of
    least squared error among those that were tried: ranges shrunk step by step, each fitted to the codes it gives.
    `zeros` other than any are for checkpoints, with scales in bfloat16: a code stands for zero, of each group's own or
    always 8."""
    inputs = weight.shape[1]
    while inputs % group:
        group //= 2
    rows = max(1, _AT_ONCE // inputs)
    parts = [_search(part.float().reshape(-1, group), zeros) for part in torch.split(weight, rows)]
    codes, scale, minimum = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    count = weight.shape[0]
    return Coded(codes.view(count, inputs), scale.view(count, -1), Coding("u4", group), minimum=minimum.view(count, -1))


def _search(groups: torch.Tensor, zeros: Zeros) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """groups [count, size] -> codes, scales and minima."""
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    if zeros == "own":
        low, high = low.clamp_max(0), high.clamp_min(0)
    elif zeros == "8":
        high = torch.maximum(high, -low)
        low = -high
    best: tuple[torch.Tensor, ...] | None = None
    for shrink in _SHRINKS:
        middle = (low + high) / 2
        scale = ((high - low) * shrink / 15).clamp_min(1e-10)
        start = middle - scale * 7.5
        if zeros != "any":
            scale, start = _fitted(scale, start, zeros)
        codes = torch.round((groups - start) / scale).clamp_(0, 15)
        if zeros == "any":
            scale, start = _least_squares(groups, codes, scale, start)
            codes = torch.round((groups - start) / scale).clamp_(0, 15)
        error = (codes * scale + start - groups).square().sum(1, keepdim=True)
        found = (error, codes, scale, start)
        if best is None:
            best = found
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
    assert best is not None, "some range was tried"
    return best[1].to(torch.uint8), best[2], best[3]


def _fitted(scale: torch.Tensor, start: torch.Tensor, zeros: Zeros) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale.to(torch.bfloat16).float()
    zero = torch.round(-start / scale).clamp_(0, 15) if zeros == "own" else torch.full_like(scale, 8)
    return scale, -zero * scale


def _least_squares(
    groups: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and minimum of least squared error, given the codes; those of groups of one code stay."""
    size = groups.shape[1]
    mean, level = groups.mean(1, keepdim=True), codes.mean(1, keepdim=True)
    spread = codes.square().sum(1, keepdim=True) - size * level * level
    both = (codes * groups).sum(1, keepdim=True) - size * level * mean
    known = (spread > 0) & (both > 0)
    better = torch.where(known, both / spread.clamp_min(1e-12), scale)
    return better, torch.where(known, mean - better * level, start)


QUANTIZERS: dict[str, Callable[[torch.Tensor], Coded]] = {
    "fp8": fp8,
    "fp8_block": fp8_block,
    "int8": int8,
    "int4": int4,
}
