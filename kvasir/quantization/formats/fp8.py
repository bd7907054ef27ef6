"""8-bit floats as DeepSeek and Qwen ship them: a scale for each block of 128x128, or one for the matrix.

The other formats that have such weights (compressed-tensors, ModelOpt) use the scheme of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, by_block
from kvasir.quantization.formats.base import (
    Config,
    Scheme,
    Shapes,
    Tensors,
    WeightFormat,
    check_type,
    damaged,
    group_of,
    is_listed,
    refuse,
)


def spread(module: str, scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> torch.Tensor:
    """Scales of a matrix, a channel, a group or a block as [outputs, groups]."""
    outputs, inputs = shape
    if block is not None:
        if inputs % block[1]:
            raise refuse(f"{module} has {inputs} inputs, which blocks of {block[1]} do not divide")
        return by_block(scale, shape, block, f"{module}'s scale").contiguous()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous()
    if scale.numel() == outputs:
        return scale.reshape(outputs, 1).contiguous()
    if scale.dim() == 2 and scale.shape[0] == outputs and scale.shape[1] and inputs % scale.shape[1] == 0:
        return scale.contiguous()
    raise damaged(module, f"{list(scale.shape)} scales do not fit a matrix of {outputs}x{inputs}")


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """`weight` in e4m3 with scales in the tensor `scale_name`, which multiply."""

    scale_name: str = "weight_scale"
    block: tuple[int, int] | None = None
    inputs: str = ""  # e4m3: activations are rounded, too
    unused = ("input_scale", "input_zero_point", "output_scale")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("weight", self.scale_name)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return shapes["weight"]

    def decode(self, module: str, tensors: Tensors) -> Coded:
        weight = tensors["weight"]
        check_type(module, "weight", weight, torch.float8_e4m3fn)
        shape = (weight.shape[0], weight.shape[1])
        scale = spread(module, tensors[self.scale_name].float(), shape, self.block)
        group = group_of(module, shape[1] // scale.shape[1], shape[1])
        return Coded(weight.view(torch.uint8), scale, Coding("e4m3", group, inputs="" if self.block else self.inputs))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("e4m3", self.block[1] if self.block else 0, inputs=self.inputs))


class FP8(WeightFormat):
    name = "fp8"
    marks = ("weight_scale_inv", "weight_scale")

    def __init__(self, config: Config) -> None:
        block = config.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2):
            raise refuse(f"fp8 with weight_block_size={block!r}")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refuse(f"fp8 of the kind {config['fmt']!r} (there is e4m3)")
        self._scheme = (
            FloatScheme(inputs="e4m3")
            if block is None
            else FloatScheme("weight_scale_inv", (int(block[0]), int(block[1])))
        )
        self._plain = (*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ()))

    def scheme(self, module: str) -> Scheme | None:
        return None if is_listed(module, self._plain) else self._scheme
