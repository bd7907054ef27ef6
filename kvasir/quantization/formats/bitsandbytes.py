"""bitsandbytes: 4-bit floats in blocks of a row, whose scales may be quantized themselves, and 8-bit rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.kernels.reference import LEVELS
from kvasir.quantization.coded import Coded, Coding, RandomCoding
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
    is_listed,
    refuse,
)


@dataclass(frozen=True)
class FourBitBlocks(Scheme):
    kind: str  # nf4 or fp4

    @property
    def state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("weight", "weight.absmax", "weight.quant_map", self.state)

    may_have = ("weight.nested_absmax", "weight.nested_quant_map")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        return tuple(_state(module, read(self.state))["shape"])

    def decode(self, module: str, tensors: Tensors) -> Coded:
        state = _state(module, tensors[self.state])
        (outputs, inputs), block = state["shape"], int(state["blocksize"])
        if inputs % block:
            raise refuse(f"{module} has {inputs} inputs, which blocks of {block} do not divide")
        levels = tensors["weight.quant_map"].float()
        if not torch.equal(levels.cpu(), torch.tensor(LEVELS[self.kind])):
            raise refuse(f"{module} with levels of its own, {levels[:4].tolist()} and so on")
        packed = tensors["weight"].contiguous().view(torch.uint8).flatten()
        check_shape(module, "weight", tuple(packed.shape), (outputs * inputs // 2,))
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(outputs, inputs)
        scale = _absmax(module, tensors, state)
        check_shape(module, "weight.absmax", tuple(scale.shape), (outputs * inputs // block,))
        scale = scale.view(outputs, inputs // block)
        return Coded(codes, scale, Coding(self.kind, block))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding(self.kind, 64))


def _state(module: str, tensor: torch.Tensor) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(bytes(tensor.cpu().tolist()))
        shape, block, outer = state["shape"], state["blocksize"], state.get("nested_blocksize", 1)
        if len(shape) != 2 or not all(isinstance(size, int) and size > 0 for size in [*shape, block, outer]):
            raise ValueError(f"shape {shape}, blocksize {block}, nested_blocksize {outer}")
        state["nested_offset"] = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(module, f"its quant_state cannot be read ({error!r})") from error
    return state


def _absmax(module: str, tensors: Tensors, state: dict[str, Any]) -> torch.Tensor:
    absmax = tensors["weight.absmax"]
    if absmax.dtype == torch.float32 and "weight.nested_absmax" not in tensors:
        return absmax
    check_type(module, "weight.absmax", absmax, torch.uint8)
    if "weight.nested_absmax" not in tensors or "weight.nested_quant_map" not in tensors:
        raise damaged(
            module, "its scales are quantized, but weight.nested_absmax or weight.nested_quant_map is missing"
        )
    if "nested_blocksize" not in state:
        raise damaged(module, "its quant_state has no nested_blocksize")
    outer, levels, size = tensors["weight.nested_absmax"], tensors["weight.nested_quant_map"], state["nested_blocksize"]
    check_shape(module, "weight.nested_absmax", tuple(outer.shape), (-(-absmax.numel() // size),))
    check_shape(module, "weight.nested_quant_map", tuple(levels.shape), (256,))
    check_floating(module, "weight.nested_absmax", outer)
    check_floating(module, "weight.nested_quant_map", levels)
    return levels[absmax.int()] * outer.repeat_interleave(size)[: absmax.numel()] + float(state["nested_offset"])


@dataclass(frozen=True)
class EightBitRows(Scheme):
    needs = ("weight", "SCB")
    unused = ("weight_format",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        outputs, inputs = check_matrix(module, "weight", shapes)
        check_shape(module, "SCB", shapes["SCB"], (outputs,))
        return outputs, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        weight = tensors["weight"]
        check_type(module, "weight", weight, torch.int8)
        check_floating(module, "SCB", tensors["SCB"])
        return Coded(weight.view(torch.uint8), tensors["SCB"].float()[:, None] / 127, Coding("i8", weight.shape[1]))

    def coding(self, inputs: int) -> RandomCoding:
        return RandomCoding(Coding("i8", 0))


class BitsAndBytes(WeightFormat):
    name = "bitsandbytes"
    marks = ("weight.absmax", "SCB")

    def __init__(self, config: Config) -> None:
        four, eight = config.get("load_in_4bit"), config.get("load_in_8bit")
        kind = str(config.get("bnb_4bit_quant_type", "fp4"))
        if not four and not eight:
            raise refuse("bitsandbytes with neither load_in_4bit nor load_in_8bit")
        if four and kind not in ("nf4", "fp4"):
            raise refuse(f"bitsandbytes with bnb_4bit_quant_type={kind!r}")
        self._scheme: Scheme = FourBitBlocks(kind) if four else EightBitRows()
        self._plain = tuple(config.get("llm_int8_skip_modules") or ())

    def scheme(self, module: str) -> Scheme | None:
        return None if is_listed(module, self._plain) else self._scheme
