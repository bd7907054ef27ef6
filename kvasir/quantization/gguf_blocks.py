"""The values of GGUF's plainest packed rows, all rows at once. Worker process.

The gguf package knows every kind but takes rows sixteen at a time, which is most of a small model's start-up. These
give bit for bit what it gives: scale and offset in float32, one product, one sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
