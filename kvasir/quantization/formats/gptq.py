"""GPTQ: 2, 3, 4 or 8 bits, packed along the inputs; zero points one less than they are, except in version 2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, column_order, unpack, whole_numbers
from kvasir.quantization.formats.base import (
    Config,
    Scheme,
    Shapes,
    Tensors,
    WeightFormat,
    check_shape,
    check_type,
    group_of,
    refuse,
    whole,
)

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GPTQScheme(Scheme):
    bits: int
    group_size: int
    zero_shift: int  # added to the stored zero points
    needs = ("qweight", "qzeros", "scales")
    may_have = ("g_idx",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        words, outputs = shapes["qweight"]
        inputs = words * 32 // self.bits
        groups = inputs // group_of(module, self.group_size, inputs)
        check_shape(module, "qzeros", shapes["qzeros"], (groups, outputs * self.bits // 32))
        check_shape(module, "scales", shapes["scales"], (groups, outputs))
        if "g_idx" in shapes:
            check_shape(module, "g_idx", shapes["g_idx"], (inputs,))
        return outputs, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        for name in ("qweight", "qzeros"):
            check_type(module, name, tensors[name], torch.int32)
        inputs = tensors["qweight"].shape[0] * 32 // self.bits
        outputs = tensors["scales"].shape[1]
        group = group_of(module, self.group_size, inputs)
        numbers = unpack(tensors["qweight"].T.contiguous(), self.bits, inputs)
        zeros = unpack(tensors["qzeros"], self.bits, outputs).T.int() + self.zero_shift
        order = None
        if "g_idx" in tensors:
            order = column_order(tensors["g_idx"], group, f"{module}.g_idx")
            if order is not None:
                numbers = numbers[:, order]
        return whole_numbers(numbers, tensors["scales"].T, zeros, self.bits, order)

    def coding(self, inputs: int) -> RandomCoding:
        group = max(self.group_size, 0)
        return RandomCoding(Coding("u4", group, 1 << (self.bits - 1)) if self.bits <= 4 else Coding("i8", group))


class GPTQ(WeightFormat):
    name = "gptq"
    marks = ("qweight",)

    def __init__(self, config: Config) -> None:
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise refuse(f"GPTQ in the layout {form!r}", "Use a checkpoint in the layout 'gptq' or 'gptq_v2'.")
        self._shift = 0 if form == "gptq_v2" else 1
        self._bits = _checked(whole(config, "bits"))
        self._group = whole(config, "group_size", default=-1)
        self._dynamic = config.get("dynamic") or {}

    def scheme(self, module: str) -> Scheme | None:
        bits, group = self._bits, self._group
        for rule, changes in self._dynamic.items():
            if re.match(rule[2:] if rule[:2] in ("-:", "+:") else rule, module):
                if rule.startswith("-:"):
                    return None
                bits, group = (
                    _checked(whole(changes, "bits", default=bits)),
                    whole(changes, "group_size", default=group),
                )
                break
        return GPTQScheme(bits, group, self._shift)


def _checked(bits: int) -> int:
    if bits not in _BITS:
        raise refuse(f"GPTQ with {bits} bits (there are {', '.join(map(str, _BITS))})")
    return bits
