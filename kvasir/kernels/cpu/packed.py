"""Matrices in the layouts of csrc/cpu/kernels.h: their sizes, their memory, how they are filled and multiplied."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvasir.kernels.cpu.library import (
    ACTIVATIONS,
    CLAMPED,
    CodesStruct,
    MatrixStruct,
    RoutesStruct,
    SpansStruct,
    loaded,
)
from kvasir.kernels.cpu.ops import address

_KINDS = {"bf16": 0, "q8": 1, "q4": 2, "plain": 3, "q6": 4}
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Format:
    """How numbers are stored: value = (number - offset) * scale + min, with a scale for each `group` of inputs."""

    kind: str
    group: int = 32
    offset: int = 0
    has_min: bool = False

    def __str__(self) -> str:
        if self.kind in ("bf16", "plain"):
            return "bfloat16"
        return f"{self.kind[1:]}-bit integers in groups of {self.group}{' with minima' if self.has_min else ''}"

    def joined(self, other: Format) -> Format:
        """A format that holds the numbers of both."""
        if self == other:
            return self
        kind = max(self.kind, other.kind)  # q4, q6, q8
        return Format(kind, min(self.group, other.group), 0, has_min=True)


BF16 = Format("bf16")
PLAIN = Format("plain")  # not packed; only rows are read from it
INT8 = Format("q8", 32, 128)
INT6 = Format("q6", 32, 32)
INT4 = Format("q4", has_min=True)

# GGUF's tensor types: their numbers in a file, and the formats that hold them.
GGUF = {
    "Q4_0": (2, Format("q4", 32, 8)),
    "Q4_1": (3, INT4),
    "Q5_0": (6, Format("q6", 32, 16)),
    "Q5_1": (7, Format("q6", has_min=True)),
    "Q8_0": (8, INT8),
    "Q2_K": (10, Format("q4", 16, has_min=True)),
    "Q3_K": (11, Format("q4", 16, 4)),
    "Q4_K": (12, INT4),
    "Q5_K": (13, Format("q6", has_min=True)),
    "Q6_K": (14, Format("q6", 16, 32)),
}


@dataclass(frozen=True)
class Layout:
    """A packed matrix of [outputs, inputs]: numbers, then scales, then minima."""

    format: Format
    outputs: int
    inputs: int

    @property
    def padded_inputs(self) -> int:
        return -(-self.inputs // 32) * 32

    @property
    def _padded_outputs(self) -> int:
        return -(-self.outputs // 16) * 16

    @property
    def data_bytes(self) -> int:
        numbers = self._padded_outputs * self.padded_inputs
        if self.format.kind == "plain":
            return self.outputs * self.inputs * 2
        return {"bf16": numbers * 2, "q8": numbers, "q6": numbers // 4 * 3, "q4": numbers // 2}[self.format.kind]

    @property
    def scale_bytes(self) -> int:
        if self.format.kind in ("bf16", "plain"):
            return 0
        return self._padded_outputs * self.padded_inputs // self.format.group * 2

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes * (2 if self.format.has_min else 1)


@dataclass(frozen=True)
class Arrangement:
    """What is done to a row of inputs before a matrix multiplies it: input order[k] takes place k, times its factor."""

    order: torch.Tensor | None = None  # int32 [inputs]
    factor: torch.Tensor | None = None  # float32 [inputs], in the order of the inputs

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of an arranged matrix as those of the matrix that takes inputs as they are."""
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(1, self.order.long(), rows)
        return rows if self.factor is None else (rows.float() * self.factor).to(rows.dtype)


class PackedMatrix:
    """A layout with its memory (uint8, flat), an optional bias of bfloat16, and an arrangement of its inputs."""

    def __init__(
        self,
        layout: Layout,
        memory: torch.Tensor,
        bias: torch.Tensor | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        if memory.numel() != layout.num_bytes or not memory.is_contiguous():
            raise ValueError(f"{layout} takes {layout.num_bytes} contiguous bytes, not {memory.numel()}")
        if bias is not None and (bias.shape != (layout.outputs,) or bias.dtype != torch.bfloat16):
            raise ValueError(f"{layout.outputs} biases of bfloat16 are needed, not {list(bias.shape)} of {bias.dtype}")
        self.layout, self.memory, self.bias = layout, memory, bias
        self.arrangement = arrangement or Arrangement()
        order, factor = self.arrangement.order, self.arrangement.factor
        form, at = layout.format, memory.data_ptr()
        scale = at + layout.data_bytes
        self.struct = MatrixStruct(
            kind=_KINDS[form.kind],
            outputs=layout.outputs,
            inputs=layout.inputs,
            padded_inputs=layout.padded_inputs,
            group=form.group,
            offset=form.offset,
            data=at,
            scale=scale if layout.scale_bytes else None,
            min=scale + layout.scale_bytes if form.has_min else None,
            bias=None if bias is None else bias.data_ptr(),
            order=None if order is None else address(order, torch.int32),
            factor=None if factor is None else address(factor, torch.float32),
        )

    def with_bias(self, bias: torch.Tensor | None) -> PackedMatrix:
        return PackedMatrix(self.layout, self.memory, bias, self.arrangement)

    def fill(self, rows: torch.Tensor, first: int = 0) -> None:
        """Write [n, inputs] floats to the rows from `first` on, quantized if the format is."""
        if rows.dtype not in _SOURCES:
            rows = rows.float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        self._check_width(rows)
        self._check_place(first, len(rows))
        loaded().kv_pack(
            ctypes.byref(self.struct),
            ctypes.c_void_p(rows.data_ptr()),
            _SOURCES[rows.dtype],
            ctypes.c_int64(rows.stride(0)),
            first,
            len(rows),
        )

    def fill_gguf(self, rows: torch.Tensor, kind: str, first: int = 0) -> None:
        """Write rows of a GGUF file, [n, bytes of a row], each row contiguous, to the rows from `first` on."""
        self._check_place(first, len(rows))
        known = loaded().kv_pack_gguf(
            ctypes.byref(self.struct),
            ctypes.c_void_p(rows.data_ptr()),
            GGUF[kind][0],
            ctypes.c_int64(rows.stride(0)),
            first,
            len(rows),
        )
        if not known:
            raise ValueError(f"the library does not know {kind}")

    def fill_codes(
        self,
        codes: torch.Tensor,  # uint8 [n, inputs]
        offset: int,
        scale: torch.Tensor,  # float32 [n, groups]
        minimum: torch.Tensor | None,  # like scale
        first: int = 0,
    ) -> None:
        """Write codes that mean (code - offset) * scale + minimum to the rows from `first` on."""
        self._check_width(codes)
        self._check_place(first, len(codes))
        form, groups = self.layout.format, scale.shape[1]
        if not form.has_min and (minimum is not None or offset != form.offset):
            raise ValueError(f"{form} does not hold codes with minima or an offset of {offset}")
        if groups > 1 and self.layout.inputs // groups % form.group:
            raise ValueError(f"groups of {form.group} do not divide {groups} groups of {self.layout.inputs} inputs")
        codes, scale = codes if codes.stride(1) == 1 else codes.contiguous(), scale.contiguous()
        lowest = None if minimum is None else minimum.contiguous()
        source = CodesStruct(
            codes=codes.data_ptr(),
            stride=codes.stride(0),
            scale=address(scale, torch.float32),
            min=None if lowest is None else address(lowest, torch.float32),
            groups=groups,
            offset=offset,
        )
        loaded().kv_pack_codes(ctypes.byref(self.struct), ctypes.byref(source), first, len(codes))

    def multiply_rows(self, factors: torch.Tensor) -> None:
        """Multiply the first rows by powers of two, one for each."""
        count, form = len(factors), self.layout.format
        if form.kind == "bf16":
            self.fill(self.rows(torch.arange(count)) * factors[:, None])
            return
        blocks = -(-self.layout.outputs // 16)
        padded = torch.ones(blocks * 16).index_copy_(0, torch.arange(count), factors).view(blocks, 1, 16)
        per_group = self.memory[self.layout.data_bytes : self.layout.num_bytes].view(torch.float16)
        per_group.view(-1, blocks, per_group.numel() // (2 if form.has_min else 1) // blocks // 16, 16).mul_(padded)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """These rows as bfloat16, [n, inputs]."""
        out = torch.empty(len(numbers), self.layout.inputs, dtype=torch.bfloat16)
        numbers = numbers.to(torch.int64).contiguous()
        are_there = loaded().kv_expand_rows(
            ctypes.byref(self.struct),
            ctypes.c_void_p(numbers.data_ptr()),
            len(numbers),
            ctypes.c_void_p(out.data_ptr()),
        )
        if not are_there:
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of a matrix of {self.layout.outputs}")
        return self.arrangement.restore(out)

    def linear(self, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """x [rows, inputs] bfloat16 -> [rows, outputs], with the bias and then the activation."""
        x = _dense(x)
        self._check_width(x)
        out = torch.empty(len(x), self.layout.outputs, dtype=torch.bfloat16)
        loaded().kv_linear(
            ctypes.byref(self.struct),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0)),
            len(x),
            -1 if activation is None else ACTIVATIONS[activation],
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def gated_linear(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(first half of the outputs) * second half."""
        x = _dense(x)
        self._check_width(x)
        if self.layout.outputs % 2:
            raise ValueError(f"{self.layout.outputs} outputs cannot be halved")
        out = torch.empty(len(x), self.layout.outputs // 2, dtype=torch.bfloat16)
        loaded().kv_gated_linear(
            ctypes.byref(self.struct),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0)),
            len(x),
            ACTIVATIONS[activation],
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def _check_width(self, x: torch.Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.layout.inputs:
            raise ValueError(f"rows must have {self.layout.inputs} numbers, but x is {list(x.shape)}")

    def _check_place(self, first: int, count: int) -> None:
        if first < 0 or first + count > self.layout.outputs:
            raise ValueError(f"rows {first} to {first + count} of a matrix of {self.layout.outputs}")


def pack(weight: torch.Tensor, form: Format = BF16, bias: torch.Tensor | None = None) -> PackedMatrix:
    """Pack a matrix [outputs, inputs]."""
    layout = Layout(form, *weight.shape)
    packed = PackedMatrix(layout, Arena().take(layout.num_bytes), bias)
    packed.fill(weight)
    return packed


def plain(weight: torch.Tensor) -> PackedMatrix:
    """A matrix of bfloat16 that is not packed, to read rows from."""
    layout = Layout(PLAIN, *weight.shape)
    return PackedMatrix(layout, weight.contiguous().view(torch.uint8).view(-1))


def _dense(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"the library multiplies bfloat16, not {x.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


__all__ = [
    "BF16",
    "GGUF",
    "INT4",
    "INT6",
    "INT8",
    "PLAIN",
    "Arrangement",
    "Format",
    "Layout",
    "PackedMatrix",
    "pack",
    "plain",
]


# ---------------------------------------------------------------- memory
# Measured on a Zen 4 core: a matrix of 107 MB is read at 28 GB/s from pages of 2 MiB, at 17 GB/s from pages of 4 KiB.

_HUGE = 2 << 20
_CHUNK = 64 << 20
_LINE = 64  # bytes of a cache line, at which every matrix begins
_MADV_HUGEPAGE = 14


class Arena:
    """Allocates memory for weights from large chunks, so that small matrices lie in huge pages too. A chunk lives as
    long as any part of it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised memory that begins at a cache line."""
        rounded = -(-num_bytes // _LINE) * _LINE
        if rounded > len(self._rest):
            self._rest = _huge(max(rounded, _CHUNK))
        taken, self._rest = self._rest[:num_bytes], self._rest[rounded:]
        return taken


def _huge(num_bytes: int) -> torch.Tensor:
    whole = torch.empty(num_bytes + _HUGE, dtype=torch.uint8)
    skipped = -whole.data_ptr() % _HUGE
    memory = whole[skipped : skipped + num_bytes]
    if sys.platform == "linux":  # advice, which the system may ignore
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes // _HUGE * _HUGE), _MADV_HUGEPAGE)
    return memory


# ---------------------------------------------------------------- experts


class PackedStack:
    """The matrices of a layer's experts or heads, all of one layout, in one piece of memory, [count, bytes]. `bias` is
    bfloat16 [count, outputs]."""

    def __init__(self, layout: Layout, memory: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if tuple(memory.shape) != self.memory_shape(layout, len(memory)) or not memory.is_contiguous():
            raise ValueError(f"memory of {list(memory.shape)} does not hold matrices of {layout}")
        self.layout, self.memory, self.bias = layout, memory, bias

    @staticmethod
    def memory_shape(layout: Layout, count: int) -> tuple[int, int]:
        return count, -(-layout.num_bytes // _LINE) * _LINE

    def matrix(self, number: int) -> PackedMatrix:
        bias = None if self.bias is None else self.bias[number]
        return PackedMatrix(self.layout, self.memory[number, : self.layout.num_bytes], bias)

    def linear(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[:, i] = matrix i times x[:, i]: [rows, count, inputs] -> [rows, count, outputs], bfloat16, any views."""
        wanted = [(len(x), len(self.memory), size) for size in (self.layout.inputs, self.layout.outputs)]
        if [tuple(x.shape), tuple(out.shape)] != wanted or x.stride(2) != 1 or out.stride(2) != 1:
            raise ValueError(f"{len(self.memory)} of {self.layout} do not fit {list(x.shape)} and {list(out.shape)}")
        if x.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
            raise TypeError(f"the library multiplies bfloat16, not {x.dtype} and {out.dtype}")
        spans = [SpansStruct(each.stride(0), each.stride(1)) for each in (x, out)]
        loaded().kv_linears(
            *(self.structs, len(self.memory)),
            *(ctypes.c_void_p(x.data_ptr()), ctypes.byref(spans[0]), len(x)),
            *(ctypes.c_void_p(out.data_ptr()), ctypes.byref(spans[1])),
        )

    @cached_property
    def structs(self) -> Any:
        """All matrices as the library reads them."""
        count = len(self.memory)
        return (MatrixStruct * count)(*(self.matrix(number).struct for number in range(count)))


def multiply_experts(
    gate_up: PackedStack,
    down: PackedStack,
    x: torch.Tensor,  # [tokens, hidden] bfloat16
    weights: torch.Tensor,  # [tokens, top_k] float32
    chosen: torch.Tensor,  # [tokens, top_k] int64
    activation: str | tuple[float, float],
) -> torch.Tensor:
    """The weighted sum of down(activation(gate(x)) * up(x)) of the experts that each token has chosen. `activation` is
    that of kernels.gated_activation."""
    _check_sizes(gate_up, down, x)
    if chosen.dim() != 2 or weights.shape != chosen.shape or len(chosen) != len(x):
        raise ValueError(f"{len(x)} tokens with choices {list(chosen.shape)} and weights {list(weights.shape)}")
    x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
    number, numbers = (ACTIVATIONS[activation], ()) if isinstance(activation, str) else (CLAMPED, activation)
    routes = RoutesStruct(*chosen.shape, address(chosen, torch.int64), address(weights, torch.float32), *numbers)
    out = torch.empty_like(x)
    are_there = loaded().kv_experts(
        gate_up.structs,
        down.structs,
        len(gate_up.memory),
        ctypes.byref(routes),
        ctypes.c_void_p(address(x, torch.bfloat16)),
        number,
        ctypes.c_void_p(out.data_ptr()),
    )
    if not are_there:
        raise IndexError(f"experts {chosen.min()} to {chosen.max()} of {len(gate_up.memory)}")
    return out


def _check_sizes(gate_up: PackedStack, down: PackedStack, x: torch.Tensor) -> None:
    up, back = gate_up.layout, down.layout
    if len(gate_up.memory) != len(down.memory) or (up.outputs, up.inputs) != (2 * back.inputs, back.outputs):
        raise ValueError(f"{len(gate_up.memory)} of {up} do not fit {len(down.memory)} of {back}")
    if x.dim() != 2 or x.shape[1] != up.inputs:
        raise ValueError(f"rows must have {up.inputs} numbers, but x is {list(x.shape)}")
