"""The experts of a layer, packed as in kernels.cpu.packed: all of one layout, one behind the other."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch

from kvasir.kernels.cpu.packed import Layout, PackedMatrix
from kvasir.platforms.cpu_library import loaded
from kvasir.platforms.cpu_structs import ACTIVATIONS, Matrix

_LINE = 64  # bytes; each matrix begins with a cache line


class PackedStack:
    """Matrices of one layout in one piece of memory, [count, bytes]."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        assert tuple(memory.shape) == self.memory_shape(layout, len(memory)), "memory and layout differ"
        self.layout, self.memory = layout, memory

    @staticmethod
    def memory_shape(layout: Layout, count: int) -> tuple[int, int]:
        return count, -(-layout.num_bytes // _LINE) * _LINE

    def matrix(self, number: int) -> PackedMatrix:
        return PackedMatrix(self.layout, self.memory[number, : self.layout.num_bytes])

    @cached_property
    def structs(self) -> Any:
        """All of them, as the library reads them."""
        count = len(self.memory)
        return (Matrix * count)(*(self.matrix(number).struct for number in range(count)))


def multiply(
    gate_up: PackedStack, down: PackedStack, x: torch.Tensor, starts: torch.Tensor, activation: str
) -> torch.Tensor:
    """x [rows, hidden] bfloat16, sorted by expert: expert e has the rows starts[e] up to starts[e + 1]. Gives
    down(activation(gate(x)) * up(x)) of each row's expert."""
    experts = len(gate_up.memory)
    assert x.dtype == torch.bfloat16, f"the library multiplies bfloat16, not {x.dtype}"
    assert starts.dtype == torch.int32 and len(starts) == experts + 1, "a start for each expert, and the end"
    x, starts = x.contiguous(), starts.contiguous()
    out = torch.empty(len(x), down.layout.outputs, dtype=torch.bfloat16)
    loaded().kv_experts(
        gate_up.structs,
        down.structs,
        experts,
        ctypes.c_void_p(starts.data_ptr()),
        ctypes.c_void_p(x.data_ptr()),
        ACTIVATIONS[activation],
        ctypes.c_void_p(out.data_ptr()),
    )
    return out
