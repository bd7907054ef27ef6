"""NVIDIA ModelOpt: 8- and 4-bit floats, 8- and 4-bit integers, whose inputs may have to be multiplied first."""

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
    check_floating,
    check_matrix,
    check_shape,
    check_type,
    group_of,
    is_listed,
    refuse,
    whole,
)
from kvasir.quantization.formats.compressed_tensors import Integers
from kvasir.quantization.formats.floats import FloatScheme, MXFP4Scheme, MXFP8Scheme, NVFP4Scheme, spread


@dataclass(frozen=True)
class PairsOfOutputs(Scheme):
    """4-bit numbers of two's complement. A byte has two outputs."""

    group_size: int
    needs = ("weight", "weight_scale")
    unused = ("input_scale",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        half, inputs = check_matrix(module, "weight", shapes)
        groups = inputs // group_of(module, self.group_size, inputs)
        check_shape(module, "weight_scale", shapes["weight_scale"], (half * 2, groups))
        return half * 2, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed = tensors["weight"]
        check_type(module, "weight", packed, torch.uint8)
        check_floating(module, "weight_scale", tensors["weight_scale"])
        numbers = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1) ^ 8
        scale = spread(module, tensors["weight_scale"], (numbers.shape[0], numbers.shape[1]), None)
        return whole_numbers(numbers, scale, 8, 4)

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("u4", self.group_size, 8))


@dataclass(frozen=True)
class Smoothed(Scheme):
    """The matrix of another scheme, whose inputs may have to be multiplied first."""

    inner: Scheme

    @property
    def needs(self) -> tuple[str, ...]:
        return self.inner.needs

    @property
    def may_have(self) -> tuple[str, ...]:
        return (*self.inner.may_have, "pre_quant_scale")

    @property
    def unused(self) -> tuple[str, ...]:
        return self.inner.unused

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        shape = self.inner.shape(module, shapes, read)
        if "pre_quant_scale" in shapes:
            check_shape(module, "pre_quant_scale", shapes["pre_quant_scale"], shape[1:])
        return shape

    def decode(self, module: str, tensors: Tensors) -> Coded:
        coded, column = self.inner.decode(module, tensors), tensors.get("pre_quant_scale")
        if column is None:
            return coded
        check_floating(module, "pre_quant_scale", column)
        # Kernels round inputs to 8 bits where they come as they are.
        return replace(coded, column=column.clone(), coding=replace(coded.coding, inputs=""))

    def coding(self, inputs: int) -> RandomCoding:
        return self.inner.coding(inputs)


def _scheme(algorithm: str, config: Config) -> Scheme:
    return Smoothed(_inner(algorithm.upper(), config))


def _inner(algorithm: str, config: Config) -> Scheme:
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return FloatScheme(inputs="e4m3")
    if algorithm in ("FP8_PB_WO", "FP8_PB_REAL"):
        size = whole(config, "group_size", default=128)
        return FloatScheme(block=(size, size))
    if algorithm == "MXFP8":
        return MXFP8Scheme()
    if algorithm in ("MXFP4", "W4A8_MXFP4_FP8"):
        return MXFP4Scheme("weight")
    if algorithm in ("W8A16", "W8A8_SQ_PER_CHANNEL"):
        return Integers(8, symmetric=True)
    if algorithm in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"):
        if whole(config, "group_size", default=16) != 16:
            raise refuse(f"ModelOpt NVFP4 in groups of {config['group_size']} (there is 16)")
        return NVFP4Scheme("weight", "weight_scale_2", divides=False)
    if algorithm == "W4A16_AWQ":
        return PairsOfOutputs(whole(config, "group_size", default=128))
    raise refuse(f"ModelOpt with quant_algo {algorithm!r}")


class ModelOpt(WeightFormat):
    """One scheme for the whole model, or one for each module."""

    name = "modelopt"
    marks = ("weight_scale",)

    def __init__(self, config: Config) -> None:
        inner = config.get("quantization")
        config = {**config, **inner} if isinstance(inner, Mapping) else config
        self._plain = (*(config.get("exclude_modules") or ()), *(config.get("ignore") or ()))
        algorithm = str(config.get("quant_algo"))
        self._of_module: dict[str, Scheme] | None = None
        if config.get("quant_algo") is None and config.get("kv_cache_quant_algo") is not None:
            self._of_module = {}  # only the cache is quantized
        elif algorithm == "MIXED_PRECISION":
            layers = config.get("quantized_layers") or {}
            self._of_module = {name: _scheme(str(of.get("quant_algo")), of) for name, of in layers.items()}
        else:
            self._scheme = _scheme(algorithm, config)

    def scheme(self, module: str) -> Scheme | None:
        if self._of_module is not None:
            return self._of_module.get(module)
        return None if is_listed(module, self._plain) else self._scheme
