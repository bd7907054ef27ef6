"""Formats of small floats: FP8 as DeepSeek, Qwen and Meta ship it, NVFP4, MXFP8 and MXFP4, also of gpt-oss.

compressed-tensors, ModelOpt and AutoRound use the schemes of this file, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, power_of_two
from kvasir.quantization.formats.base import (
    Config,
    Scheme,
    Shapes,
    Tensors,
    WeightFormat,
    check_floating,
    check_matrix,
    check_shape,
    check_type,
    damaged,
    group_of,
    is_listed,
    nibbles,
    refuse,
)

_LEAST_GROUP = 32  # inputs that share a scale


def spread(module: str, scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> torch.Tensor:
    """Scales of a matrix, a channel, a group or a block as [outputs, groups]."""
    outputs, inputs = shape
    if block is not None:
        if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1:  # ModelOpt's
            scale = scale[:, 0, :, 0]
        group = gcd(inputs, block[1])  # less than a block where the last one has fewer inputs
        if group < min(_LEAST_GROUP, block[1]):
            raise refuse(f"{module} has {inputs} inputs, which blocks of {block[1]} do not divide")
        blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
        if tuple(scale.shape) != blocks:
            raise damaged(
                module, f"its scales are {list(scale.shape)}, but blocks of {block[0]}x{block[1]} need {list(blocks)}"
            )
        scale = scale.repeat_interleave(block[0], 0)[:outputs]
        return scale.repeat_interleave(block[1] // group, 1)[:, : inputs // group].contiguous()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous()
    if scale.numel() == outputs and scale.shape[0] == outputs:
        return scale.reshape(outputs, 1).contiguous()
    if scale.dim() == 2 and scale.shape[0] == outputs and scale.shape[1] and inputs % scale.shape[1] == 0:
        return scale.contiguous()
    raise damaged(module, f"{list(scale.shape)} scales do not fit a matrix of {outputs}x{inputs}")


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """`weight` in e4m3 with scales that multiply, in the one of `scale_names` that the module has."""

    scale_names: tuple[str, ...] = ("weight_scale",)
    block: tuple[int, int] | None = None
    inputs: str = ""  # e4m3: activations are rounded, too
    needs = ("weight",)
    unused = ("input_scale", "input_scale_ub", "input_zero_point", "output_scale", "activation_scale")

    @property
    def may_have(self) -> tuple[str, ...]:
        return self.scale_names

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        if sum(name in shapes for name in self.scale_names) != 1:
            raise damaged(module, f"it has not one tensor of scales, {' or '.join(self.scale_names)}")
        return check_matrix(module, "weight", shapes)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        weight = tensors["weight"]
        check_type(module, "weight", weight, torch.float8_e4m3fn)
        shape = (weight.shape[0], weight.shape[1])
        (name,) = (name for name in self.scale_names if name in tensors)
        check_floating(module, name, tensors[name])
        scale = spread(module, tensors[name].float(), shape, self.block)
        group = group_of(module, shape[1] // scale.shape[1], shape[1])
        return Coded(weight.view(torch.uint8), scale, Coding("e4m3", group, inputs="" if self.block else self.inputs))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e4m3", self.block[1] if self.block else 0, inputs=self.inputs))


class FP8(WeightFormat):
    """8-bit floats with a scale for each block of 128x128, or one for the matrix."""

    name = "fp8"
    marks = ("weight_scale_inv", "weight_scale")

    def __init__(self, config: Config) -> None:
        block = config.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2):
            raise refuse(f"fp8 with weight_block_size={block!r}")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refuse(f"fp8 of the kind {config['fmt']!r} (there is e4m3)")
        # Both names are in use for one scale as well as for blocks.
        size = None if block is None else (int(block[0]), int(block[1]))
        self._scheme = FloatScheme(("weight_scale_inv", "weight_scale"), size, "e4m3" if size is None else "")
        self._plain = (*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ()))

    def scheme(self, module: str) -> Scheme | None:
        return None if is_listed(module, self._plain) else self._scheme


@dataclass(frozen=True)
class NVFP4Scheme(Scheme):
    """4-bit floats; 16 inputs share an 8-bit float, and all a factor. compressed-tensors and ModelOpt store them, under
    names of their own. `factor` is the tensor with the factor of all scales; `divides`: they are divided by it."""

    weight: str
    factor: str
    divides: bool
    unused = ("input_scale", "input_global_scale")

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.weight, "weight_scale", self.factor)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return _shape(module, shapes, self.weight, 16)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed, scale, factor = (tensors[name] for name in self.needs)
        check_type(module, self.weight, packed, torch.uint8)
        check_type(module, "weight_scale", scale, torch.float8_e4m3fn)
        check_floating(module, self.factor, factor)
        if factor.numel() != 1:
            raise damaged(module, f"{self.factor} is {list(factor.shape)}, but should be one number")
        number = float(factor)
        if not 0 <= number < float("inf") or (self.divides and not number):  # 0 times a matrix of zeros is possible
            raise damaged(module, f"{self.factor} is {number}, but should be positive and finite")
        row = factor.double().reshape(1)
        row = (1 / row if self.divides else row).expand(len(packed)).contiguous()
        return Coded(nibbles(packed), scale, Coding("e2m1", 16), row=row)

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e2m1", 16), has_row=True)


@dataclass(frozen=True)
class MXFP4Scheme(Scheme):
    """4-bit floats; 32 inputs share a power of two. compressed-tensors and ModelOpt store them."""

    weight: str = "weight_packed"
    unused = ("input_scale", "input_global_scale")

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.weight, "weight_scale")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return _shape(module, shapes, self.weight, 32)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed, scale = (tensors[name] for name in self.needs)
        for name in self.needs:
            check_type(module, name, tensors[name], torch.uint8)
        return Coded(nibbles(packed), power_of_two(scale), Coding("e2m1", 32))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e2m1", 32))


@dataclass(frozen=True)
class MXFP8Scheme(Scheme):
    """8-bit floats; 32 inputs share a power of two."""

    needs = ("weight", "weight_scale")
    unused = ("input_scale",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        outputs, inputs = check_matrix(module, "weight", shapes)
        check_shape(module, "weight_scale", shapes["weight_scale"], (outputs, inputs // group_of(module, 32, inputs)))
        return outputs, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        check_type(module, "weight", weight, torch.float8_e4m3fn)
        check_type(module, "weight_scale", scale, torch.uint8)
        return Coded(weight.view(torch.uint8), power_of_two(scale), Coding("e4m3", 32))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e4m3", 32))


@dataclass(frozen=True)
class MXFP4Experts(Scheme):
    """The same numbers, all experts of a layer in one tensor: [experts, outputs, groups, 16 bytes]."""

    needs = ("blocks", "scales")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        blocks = shapes["blocks"]
        if len(blocks) != 4:
            raise damaged(module, f"blocks is {list(blocks)}, but should be [experts, outputs, groups, 16]")
        check_shape(module, "blocks", blocks[3:], (16,))
        check_shape(module, "scales", shapes["scales"], blocks[:3])
        return blocks[0] * blocks[1], blocks[2] * 32

    def decode(self, module: str, tensors: Tensors) -> Coded:
        for name in self.needs:
            check_type(module, name, tensors[name], torch.uint8)
        codes = nibbles(tensors["blocks"]).flatten(2).flatten(0, 1)
        return Coded(codes, power_of_two(tensors["scales"]).flatten(0, 1), Coding("e2m1", 32))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e2m1", 32))


class MXFP4(WeightFormat):
    """The experts of gpt-oss; all else is not quantized."""

    name = "mxfp4"
    marks = ("blocks",)
    joint = "_"
    matrix = ""

    def __init__(self, config: Config) -> None:
        self._plain = tuple(config.get("modules_to_not_convert") or ())

    def scheme(self, module: str) -> Scheme | None:
        return MXFP4Experts() if ".experts." in module and not is_listed(module, self._plain) else None


def _shape(module: str, shapes: Shapes, weight: str, group: int) -> tuple[int, int]:
    outputs, width = check_matrix(module, weight, shapes)
    check_shape(module, "weight_scale", shapes["weight_scale"], (outputs, width * 2 // group))
    return outputs, width * 2
