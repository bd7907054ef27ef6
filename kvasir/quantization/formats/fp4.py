"""4-bit floats with small groups: NVFP4 (16 inputs share an 8-bit float, and all a factor) and MXFP4 (32 share a power
of two). compressed-tensors, ModelOpt and gpt-oss store them, under names of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding
from kvasir.quantization.formats.base import Scheme, Shapes, Tensors, check_shape, check_type, damaged, nibbles


@dataclass(frozen=True)
class NVFP4Scheme(Scheme):
    """`factor` is the tensor with the factor of all scales; `divides`: they are divided by it."""

    weight: str
    factor: str
    divides: bool
    unused = ("input_scale", "input_global_scale")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.weight, "weight_scale", self.factor)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return _shape(module, shapes, self.weight, 16)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed, scale, factor = (tensors[name] for name in self.needs)
        check_type(module, self.weight, packed, torch.uint8)
        check_type(module, "weight_scale", scale, torch.float8_e4m3fn)
        if factor.numel() != 1:
            raise damaged(module, f"{self.factor} is {list(factor.shape)}, but should be one number")
        row = factor.double().reshape(1)
        row = (1 / row if self.divides else row).expand(len(packed)).contiguous()
        return Coded(nibbles(packed), scale, Coding("e2m1", 16), row=row)

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e2m1", 16), has_row=True)


@dataclass(frozen=True)
class MXFP4Scheme(Scheme):
    needs = ("weight_packed", "weight_scale")
    unused = ("input_global_scale",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return _shape(module, shapes, "weight_packed", 32)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed, scale = tensors["weight_packed"], tensors["weight_scale"]
        for name in self.needs:
            check_type(module, name, tensors[name], torch.uint8)
        return Coded(nibbles(packed), power_of_two(scale), Coding("e2m1", 32))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e2m1", 32))


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127). The byte 255 means no number; it becomes infinity, which is refused as well."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # those of a float32; the least is subnormal
    return bits.view(torch.float32)


def _shape(module: str, shapes: Shapes, weight: str, group: int) -> tuple[int, int]:
    outputs, width = shapes[weight]
    check_shape(module, "weight_scale", shapes["weight_scale"], (outputs, width * 2 // group))
    return outputs, width * 2
