"""compressed-tensors, which llm-compressor writes: groups of modules, each with a scheme and a way of storing it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvasir.quantization.coded import Coded, Coding, RandomCoding, column_order, unpack, whole_numbers
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
    refuse,
    whole,
)
from kvasir.quantization.formats.floats import FloatScheme, MXFP4Scheme, MXFP8Scheme, NVFP4Scheme, spread


@dataclass(frozen=True)
class PackedIntegers(Scheme):
    """Whole numbers in words of 32 bits. New versions of compressed-tensors let numbers cross from a word to the next,
    old ones leave a word's last bits empty: of 3, 5, 6 and 7 bits the number of words tells."""

    bits: int
    group_size: int  # -1: by channel
    is_tensor: bool
    symmetric: bool
    may_have = ("weight_zero_point", "weight_g_idx")
    unused = ("input_scale", "input_zero_point")
    needs = ("weight_packed", "weight_scale", "weight_shape")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        check_shape(module, "weight_shape", shapes["weight_shape"], (2,))
        outputs, inputs = (int(size) for size in read("weight_shape").tolist())
        packed = check_matrix(module, "weight_packed", shapes)
        if packed[0] != outputs or packed[1] not in _widths(self.bits, inputs):
            check_shape(module, "weight_packed", packed, (outputs, _widths(self.bits, inputs)[0]))
        if not self.symmetric and "weight_zero_point" not in shapes:
            raise damaged(module, "weight_zero_point is missing, though it is not symmetric")
        return outputs, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        packed = tensors["weight_packed"]
        check_type(module, "weight_packed", packed, torch.int32)
        outputs, inputs = (int(size) for size in tensors["weight_shape"].tolist())
        numbers = _unpacked(packed, self.bits, inputs)
        check_floating(module, "weight_scale", tensors["weight_scale"])
        scale = spread(module, tensors["weight_scale"], (outputs, inputs), None)
        group = group_of(module, self.group_size, inputs)
        if scale.shape[1] != inputs // group:
            raise damaged(module, f"{scale.shape[1]} scales a row are not those of groups of {group}")
        zero: torch.Tensor | int = 1 << (self.bits - 1)
        if not self.symmetric:
            zero = self._zero_points(module, tensors["weight_zero_point"], scale)
        order = None
        if "weight_g_idx" in tensors and bool((tensors["weight_g_idx"] >= 0).all()):
            order = column_order(tensors["weight_g_idx"], group, f"{module}.weight_g_idx")
            if order is not None:
                numbers = numbers[:, order]
        return whole_numbers(numbers, scale, zero, self.bits, order)

    def _zero_points(self, module: str, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Read the zero points. Those of groups and channels are packed along the outputs; one for the whole matrix is
        not."""
        if self.is_tensor and stored.numel() == 1 and stored.dtype == torch.int8:
            return (stored.int() + (1 << (self.bits - 1))).reshape(1, 1).expand(scale.shape)
        outputs, groups = scale.shape
        check_type(module, "weight_zero_point", stored, torch.int32)
        if tuple(stored.shape) != (_widths(self.bits, outputs)[1], groups):
            check_shape(module, "weight_zero_point", tuple(stored.shape), (_widths(self.bits, outputs)[0], groups))
        return _unpacked(stored.T.contiguous(), self.bits, outputs).T.int()

    def coding(self, inputs: int) -> RandomCoding:
        group, half = max(self.group_size, 0), 1 << (self.bits - 1)
        if self.bits > 4:
            return RandomCoding(Coding("i8", group), has_minimum=not self.symmetric)
        return RandomCoding(Coding("u4", group, half if self.symmetric else 0), has_minimum=not self.symmetric)


def _widths(bits: int, count: int) -> tuple[int, int]:
    """Numbers of words that hold this many numbers, if numbers cross words and if they do not."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    return unpack(words, bits, count, dense=words.shape[-1] == _widths(bits, count)[0])


@dataclass(frozen=True)
class Integers(Scheme):
    """Whole numbers in a byte each."""

    bits: int
    symmetric: bool
    block: tuple[int, int] | None = None
    needs = ("weight", "weight_scale")
    may_have = ("weight_zero_point",)
    unused = ("input_scale", "input_zero_point", "weight_shape")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        if not self.symmetric and "weight_zero_point" not in shapes:
            raise damaged(module, "weight_zero_point is missing, though it is not symmetric")
        return check_matrix(module, "weight", shapes)

    def decode(self, module: str, tensors: Tensors) -> Coded:
        weight = tensors["weight"]
        check_type(module, "weight", weight, torch.int8)
        shape, half = (weight.shape[0], weight.shape[1]), 1 << (self.bits - 1)
        check_floating(module, "weight_scale", tensors["weight_scale"])
        scale = spread(module, tensors["weight_scale"], shape, self.block)
        zero: torch.Tensor | int = half
        if not self.symmetric:
            stored = tensors["weight_zero_point"]
            check_type(module, "weight_zero_point", stored, torch.int8)
            check_shape(module, "weight_zero_point", tuple(stored.shape), tuple(tensors["weight_scale"].shape))
            zero = spread(module, stored.int(), shape, self.block) + half
        return whole_numbers((weight.int() + half).to(torch.uint8), scale, zero, self.bits)

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("i8", 0) if self.bits > 4 else Coding("u4", 0, 1 << (self.bits - 1)))


class CompressedTensors(WeightFormat):
    name = "compressed-tensors"
    marks = ("weight_packed", "weight_scale")

    def __init__(self, config: Config) -> None:
        for part in ("sparsity_config", "transform_config"):
            entry = config.get(part)
            if entry and not (isinstance(entry, Mapping) and entry.get("format") == "dense"):
                raise refuse(f"compressed-tensors with a {part}")
        self._ignored = tuple(config.get("ignore") or ())
        self._groups: list[tuple[tuple[str, ...], Scheme]] = []
        for name, group in (config.get("config_groups") or {}).items():
            if not isinstance(group, Mapping):
                raise refuse(f"config_groups.{name} is {group!r:.80}")
            weights = group.get("weights")
            if weights is not None:
                form = group.get("format") or config.get("format")
                self._groups.append(
                    (
                        tuple(group.get("targets") or ()),
                        _scheme(name, weights, form, activations=bool(group.get("input_activations"))),
                    )
                )

    def scheme(self, module: str) -> Scheme | None:
        if any(_names(target, module) for target in self._ignored):
            return None
        # A module's own name counts more than its class. All matrices of a decoder but its embedding are
        # of the class Linear.
        for wanted in (_names, _is_class):
            for targets, scheme in self._groups:
                if any(wanted(target, module) for target in targets):
                    return scheme
        return None


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module or module.endswith(f".{target}")


def _is_class(target: str, module: str) -> bool:
    if "embed" in module.rpartition(".")[2]:
        return target == "Embedding"
    return target in ("Linear", "ParallelLMHead") or target.endswith(("Experts", "Linear"))


def _scheme(name: str, weights: Config, form: str | None, *, activations: bool) -> Scheme:
    kind, bits = weights.get("type", "int"), whole(weights, "num_bits")
    strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
    block = weights.get("block_structure") if strategy == "block" else None
    size = None if block is None else _block(name, block)
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise refuse(f"weights with the strategy {strategy!r} (config_groups.{name})")
    if form == "pack-quantized" and kind == "int" and bits <= 8 and size is None:
        group = whole(weights, "group_size", default=-1) if strategy == "group" else -1
        return PackedIntegers(bits, group, strategy == "tensor", symmetric)
    if form in ("int-quantized", "naive-quantized") and kind == "int" and bits <= 8:
        return Integers(bits, symmetric, size)
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        return FloatScheme(block=size, inputs="e4m3" if activations else "")
    if form == "nvfp4-pack-quantized":
        return NVFP4Scheme("weight_packed", "weight_global_scale", divides=True)
    if form == "mxfp8-quantized":
        return MXFP8Scheme()
    if form == "mxfp4-pack-quantized":
        return MXFP4Scheme()
    raise refuse(f"compressed-tensors {form!r} with {bits}-bit {kind} weights (config_groups.{name})")


def _block(name: str, block: object) -> tuple[int, int]:
    sizes = re.findall(r"\d+", str(block))
    if len(sizes) != 2:
        raise refuse(f"block_structure={block!r} (config_groups.{name})")
    return int(sizes[0]), int(sizes[1])
