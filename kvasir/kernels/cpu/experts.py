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
        if tuple(memory.shape) != self.memory_shape(layout, len(memory)) or not memory.is_contiguous():
            raise ValueError(f"memory of {list(memory.shape)} is not that of matrices of {layout}")
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
    _check_sizes(gate_up, down, x)
    if chosen.dim() != 2 or weights.shape != chosen.shape or len(chosen) != len(x):
        raise ValueError(f"{len(x)} tokens with choices {list(chosen.shape)} and weights {list(weights.shape)}")
    x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
    routes = Routes(*chosen.shape, address(chosen, torch.int64), address(weights, torch.float32))
    out = torch.empty_like(x)
    are_there = loaded().kv_experts(
        gate_up.structs,
        down.structs,
        len(gate_up.memory),
        ctypes.byref(routes),
        ctypes.c_void_p(address(x, torch.bfloat16)),
        ACTIVATIONS[activation],
        ctypes.c_void_p(out.data_ptr()),
    )
    if not are_there:
        raise IndexError(f"experts {chosen.min()} to {chosen.max()} of {len(gate_up.memory)}")
    return out


def _check_sizes(gate_up: PackedStack, down: PackedStack, x: torch.Tensor) -> None:
    up, back = gate_up.layout, down.layout
    if len(gate_up.memory) != len(down.memory) or (up.outputs, up.inputs) != (2 * back.inputs, back.outputs):
        raise ValueError(f"{len(gate_up.memory)} of {up} do not go with {len(down.memory)} of {back}")
    if x.dim() != 2 or x.shape[1] != up.inputs:
        raise ValueError(f"rows of {up.inputs} numbers are wanted, not {list(x.shape)}")
