"""NVIDIA ModelOpt: FP8, NVFP4 and 4-bit AWQ, one for the whole model or one for each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, whole_numbers
from kvasir.quantization.formats.base import (
    Config,
    Scheme,
    Shapes,
    Tensors,
    WeightFormat,
    check_shape,
    check_type,
    is_listed,
    refuse,
    whole,
)
from kvasir.quantization.formats.fp4 import NVFP4Scheme
from kvasir.quantization.formats.fp8 import FloatScheme, spread


@dataclass(frozen=True)
class ModelOptAWQ(Scheme):
    """4-bit numbers of two's complement. A byte has two outputs, and inputs may have to be multiplied first."""

    needs = ("weight", "weight_scale")
    may_have = ("pre_quant_scale",)
    unused = ("input_scale",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        half, inputs = shapes["weight"]
        if "pre_quant_scale" in shapes:
            check_shape(module, "pre_quant_scale", shapes["pre_quant_scale"], (inputs,))
        return half * 2, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed = tensors["weight"]
        check_type(module, "weight", packed, torch.uint8)
        numbers = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1) ^ 8
        scale = spread(module, tensors["weight_scale"], (numbers.shape[0], numbers.shape[1]), None)
        coded = whole_numbers(numbers, scale, 8, 4)
        column = tensors.get("pre_quant_scale")
        return coded if column is None else replace(coded, column=column.clone())

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("u4", 128, 8))


def _scheme(algorithm: str, config: Config) -> Scheme:
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return FloatScheme(inputs="e4m3")
    if algorithm in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"):
        if whole(config, "group_size", default=16) != 16:
            raise refuse(f"ModelOpt NVFP4 in groups of {config['group_size']} (there is 16)")
        return NVFP4Scheme("weight", "weight_scale_2", divides=False)
    if algorithm == "W4A16_AWQ":
        return ModelOptAWQ()
    raise refuse(f"ModelOpt with quant_algo {algorithm!r}")


class ModelOpt(WeightFormat):
    name = "modelopt"
    marks = ("weight_scale",)

    def __init__(self, config: Config) -> None:
        inner = config.get("quantization")
        config = {**config, **inner} if isinstance(inner, Mapping) else config
        self._plain = (*(config.get("exclude_modules") or ()), *(config.get("ignore") or ()))
        algorithm = str(config.get("quant_algo"))
        self._of_module: dict[str, Scheme] | None = None
        if algorithm == "MIXED_PRECISION":
            layers = config.get("quantized_layers") or {}
            self._of_module = {name: _scheme(str(of.get("quant_algo")), of) for name, of in layers.items()}
        else:
            self._scheme = _scheme(algorithm, config)

    def scheme(self, module: str) -> Scheme | None:
        if self._of_module is not None:
            return self._of_module.get(module)
        return None if is_listed(module, self._plain) else self._scheme
