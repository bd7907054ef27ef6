"""AutoRound: the tensors of GPTQ, AWQ or compressed-tensors, with bits and groups for each module in its config."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvasir.quantization.formats.awq import AWQScheme
from kvasir.quantization.formats.base import Config, Scheme, WeightFormat, refuse, whole
from kvasir.quantization.formats.compressed_tensors import PackedIntegers
from kvasir.quantization.formats.fp8 import FloatScheme
from kvasir.quantization.formats.gptq import GPTQScheme, _checked


class AutoRound(WeightFormat):
    name = "auto-round"
    marks = ("qweight", "weight_packed", "weight_scale")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._packing = str(config.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
        self._extra = config.get("extra_config") or {}
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
        self._blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else tuple(blocks)
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
        bits, group = whole(config, "bits", default=4), whole(config, "group_size", default=128)
        if self._packing in ("auto_gptq", "gptq", "gptqmodel"):
            return GPTQScheme(_checked(bits), group, 1)
        if self._packing in ("auto_awq", "awq") and bits == 4:
            return AWQScheme(group)
        if self._packing == "llm_compressor" and config.get("data_type", "int") == "int":
            return PackedIntegers(bits, group, False, bool(config.get("sym", True)))
        if self._packing in ("fp8_static", "fp8"):
            return FloatScheme()
        raise refuse(f"AutoRound with {bits} bits in the packing {self._packing!r}")


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*^$+[")
