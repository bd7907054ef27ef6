"""AWQ: 4 bits, packed along the outputs in an order of their own, with zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, unpack, whole_numbers
from kvasir.quantization.formats.base import (
    Config,
    Scheme,
    Shapes,
    Tensors,
    WeightFormat,
    check_shape,
    check_type,
    group_of,
    is_listed,
    refuse,
    whole,
)

_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # in which nibble of a word each of eight outputs is


@dataclass(frozen=True)
class AWQScheme(Scheme):
    group_size: int
    needs = ("qweight", "qzeros", "scales")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        inputs, words = shapes["qweight"]
        groups = inputs // group_of(module, self.group_size, inputs)
        check_shape(module, "qzeros", shapes["qzeros"], (groups, words))
        check_shape(module, "scales", shapes["scales"], (groups, words * 8))
        return words * 8, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        numbers, zeros = (_outputs(module, name, tensors[name]) for name in ("qweight", "qzeros"))
        return whole_numbers(numbers.T, tensors["scales"].T, zeros.T.int(), 4)

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("u4", max(self.group_size, 0)), has_minimum=True)


def _outputs(module: str, name: str, words: torch.Tensor) -> torch.Tensor:
    check_type(module, name, words, torch.int32)
    rows = unpack(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
    return rows[:, :, torch.tensor(_NIBBLE, device=rows.device)].reshape(len(words), -1)


class AWQ(WeightFormat):
    name = "awq"
    marks = ("qweight",)

    def __init__(self, config: Config) -> None:
        bits, version = whole(config, "bits", "w_bit"), str(config.get("version", "gemm")).lower()
        if bits != 4:
            raise refuse(f"AWQ with {bits} bits (there are 4)")
        if version != "gemm":
            raise refuse(f"AWQ in the layout {version!r}", "Use a checkpoint in the layout 'gemm'.")
        if not config.get("zero_point", True):
            raise refuse("AWQ without zero points", "Use a checkpoint with zero_point=true.")
        self._scheme = AWQScheme(whole(config, "group_size", "q_group_size", default=128))
        self._plain = tuple(config.get("modules_to_not_convert") or ())

    def scheme(self, module: str) -> Scheme | None:
        return None if is_listed(module, self._plain) else self._scheme
