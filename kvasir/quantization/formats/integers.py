"""Formats of integers packed into 32-bit words: GPTQ, AWQ and AutoRound."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
    is_listed,
    refuse,
    whole,
)
from kvasir.quantization.formats.compressed_tensors import PackedIntegers
from kvasir.quantization.formats.floats import FloatScheme, MXFP4Scheme, MXFP8Scheme, NVFP4Scheme

_BITS = (2, 3, 4, 8)
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # in which nibble of a word each of eight outputs is


@dataclass(frozen=True)
class GPTQScheme(Scheme):
    """2, 3, 4 or 8 bits, packed along the inputs; zero points one less than they are, except in version 2. A zero point
    of 0 has become the largest number then; of 2, 4 and 8 bits writers subtract from whole words, which borrows."""

    bits: int
    group_size: int
    zero_shift: int  # added to the stored zero points, 0 or 1
    ordered: bool = False  # act-order: groups are of inputs that need not stand side by side
    needs = ("qweight", "qzeros", "scales")
    may_have = ("g_idx",)

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        words, outputs = check_matrix(module, "qweight", shapes)
        inputs = words * 32 // self.bits
        groups = inputs // group_of(module, self.group_size, inputs)
        check_shape(module, "qzeros", shapes["qzeros"], (groups, outputs * self.bits // 32))
        check_shape(module, "scales", shapes["scales"], (groups, outputs))
        if "g_idx" in shapes:
            check_shape(module, "g_idx", shapes["g_idx"], (inputs,))
        elif self.ordered and groups > 1:
            raise damaged(module, "g_idx is missing, though its config says desc_act=true")
        return outputs, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        for name in ("qweight", "qzeros"):
            check_type(module, name, tensors[name], torch.int32)
        check_floating(module, "scales", tensors["scales"])
        inputs = tensors["qweight"].shape[0] * 32 // self.bits
        outputs = tensors["scales"].shape[1]
        group = group_of(module, self.group_size, inputs)
        numbers = unpack(tensors["qweight"].T.contiguous(), self.bits, inputs)
        zeros = self._zero_points(tensors["qzeros"], outputs)
        order = None
        if "g_idx" in tensors:
            order = column_order(tensors["g_idx"], group, f"{module}.g_idx")
            if order is not None:
                numbers = numbers[:, order]
        return whole_numbers(numbers, tensors["scales"].T, zeros, self.bits, order)

    def _zero_points(self, words: torch.Tensor, outputs: int) -> torch.Tensor:
        if self.zero_shift and 32 % self.bits == 0:
            words, shift = words + sum(1 << at for at in range(0, 32, self.bits)), 0
        else:
            shift = self.zero_shift
        return (unpack(words, self.bits, outputs).T.int() + shift) & ((1 << self.bits) - 1)

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
        if config.get("is_marlin_format"):
            raise refuse("GPTQ in the layout 'marlin'", "Use a checkpoint in the layout 'gptq' or 'gptq_v2'.")
        if (words := config.get("pack_dtype", "int32")) != "int32":
            raise refuse(f"GPTQ with pack_dtype={words!r} (there is int32)")
        self._shift = 0 if form == "gptq_v2" else 1
        self._bits = _checked(whole(config, "bits"))
        self._group = whole(config, "group_size", default=-1)
        self._dynamic = config.get("dynamic") or {}
        self._ordered = bool(config.get("desc_act"))

    def scheme(self, module: str) -> Scheme | None:
        bits, group, ordered = self._bits, self._group, self._ordered
        for rule, changes in self._dynamic.items():
            if re.match(rule[2:] if rule[:2] in ("-:", "+:") else rule, module):
                if rule.startswith("-:"):
                    return None
                bits = _checked(whole(changes, "bits", default=bits))
                group, ordered = whole(changes, "group_size", default=group), bool(changes.get("desc_act", ordered))
                break
        return GPTQScheme(bits, group, self._shift, ordered)


def _checked(bits: int) -> int:
    if bits not in _BITS:
        raise refuse(f"GPTQ with {bits} bits (there are {', '.join(map(str, _BITS))})")
    return bits


@dataclass(frozen=True)
class AWQScheme(Scheme):
    """4 bits, packed along the outputs in an order of their own, with zero points. Where the config says
    zero_point=false, all of these are 8."""

    group_size: int
    needs = ("qweight", "qzeros", "scales")

    def shape(self, module: str, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> tuple[int, ...]:
        inputs, words = check_matrix(module, "qweight", shapes)
        groups = inputs // group_of(module, self.group_size, inputs)
        check_shape(module, "qzeros", shapes["qzeros"], (groups, words))
        check_shape(module, "scales", shapes["scales"], (groups, words * 8))
        return words * 8, inputs

    def decode(self, module: str, tensors: Tensors) -> Coded:
        check_floating(module, "scales", tensors["scales"])
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
        self._scheme = AWQScheme(whole(config, "group_size", "q_group_size", default=128))
        self._plain = tuple(config.get("modules_to_not_convert") or ())

    def scheme(self, module: str) -> Scheme | None:
        return None if is_listed(module, self._plain) else self._scheme


class AutoRound(WeightFormat):
    """The tensors of GPTQ, AWQ or compressed-tensors, with bits and groups for each module in its config."""

    name = "auto-round"
    marks = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._packing = str(config.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
        self._extra = config.get("extra_config") or {}
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
        self._blocks = tuple(_names_in(blocks))
        if config.get("rotation_config"):
            raise refuse("AutoRound with a rotation_config")
        self._make(config)  # refuses what it does not know before anything is read

    def scheme(self, module: str) -> Scheme | None:
        entry = self._extra.get(module)
        if entry is None:
            entry = next(
                (of for name, of in self._extra.items() if _is_pattern(name) and re.search(name, module)), None
            )
        if entry is None and self._blocks and not any(module.startswith(f"{block}.") for block in self._blocks):
            return None
        merged = {**self._config, **entry} if isinstance(entry, Mapping) else self._config
        return None if whole(merged, "bits", default=4) >= 16 else self._make(merged)

    def _make(self, config: Config) -> Scheme:
        bits, kind = whole(config, "bits", default=4), str(config.get("data_type") or "int")
        if self._packing in ("fp8_static", "fp8"):
            block = config.get("weight_block_size")
            return FloatScheme(("weight_scale_inv", "weight_scale"), (block[0], block[1]) if block else None)
        group = whole(config, "group_size", default=128)
        if self._packing in ("auto_gptq", "gptq", "auto"):
            return GPTQScheme(_checked(bits), group, 1)
        if self._packing in ("gptqmodel", "auto_round") and kind == "int":
            return GPTQScheme(_checked(bits), group, 0)
        if self._packing in ("auto_awq", "awq") and bits == 4:
            return AWQScheme(group)
        if self._packing == "llm_compressor" and kind == "int":
            return PackedIntegers(bits, group, False, bool(config.get("sym", True)))
        if self._packing == "llm_compressor" and (kind[:5], group) == ("mx_fp", 32) and bits in (4, 8):
            return MXFP4Scheme() if bits == 4 else MXFP8Scheme()
        if self._packing == "llm_compressor" and (kind[:5], bits, group) == ("nv_fp", 4, 16):
            return NVFP4Scheme("weight_packed", "weight_global_scale", divides=True)
        raise refuse(f"AutoRound with {bits} bits of the type {kind!r} in the packing {self._packing!r}")


def _names_in(blocks: object) -> Iterator[str]:
    """Names of blocks: a text with commas, a list, or lists in it, of blocks that have one beginning."""
    if isinstance(blocks, str):
        yield from (name.strip() for name in blocks.split(","))
    elif isinstance(blocks, list | tuple):
        for block in blocks:
            yield from _names_in(block)


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*^$+[")
