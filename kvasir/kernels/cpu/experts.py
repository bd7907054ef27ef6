"""The experts of a layer, packed as in kernels.cpu.packed: all of one layout, one behind the other."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch

from kvasir.kernels.cpu.packed import Layout, PackedMatrix
from kvasir.kernels.cpu.step import address
from kvasir.platforms.cpu_library import loaded
from kvasir.platforms.cpu_structs import ACTIVATIONS, Matrix, Routes

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
    gate_up: PackedStack,
    down: PackedStack,
    x: torch.Tensor,  # [tokens, hidden] bfloat16
    weights: torch.Tensor,  # [tokens, top_k] float32
    chosen: torch.Tensor,  # [tokens, top_k] int64
    activation: str,
) -> torch.Tensor:
    """The weighted sum of down(activation(gate(x)) * up(x)) of the experts that each token has chosen."""
    assert x.dtype == torch.bfloat16, f"the library multiplies bfloat16, not {x.dtype}"
    assert x.shape[1] == gate_up.layout.inputs, "x and the experts differ in width"
    assert weights.shape == chosen.shape and len(chosen) == len(x), "each token has its choices"
    x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
    routes = Routes(*chosen.shape, address(chosen, torch.int64), address(weights, torch.float32))
    out = torch.empty(len(x), down.layout.outputs, dtype=torch.bfloat16)
    loaded().kv_experts(
        gate_up.structs,
        down.structs,
        len(gate_up.memory),
        ctypes.byref(routes),
        ctypes.c_void_p(x.data_ptr()),
        ACTIVATIONS[activation],
        ctypes.c_void_p(out.data_ptr()),
    )
    return out
