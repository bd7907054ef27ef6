"""The formats of quantized checkpoints, by the `quant_method` of their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir.config.quantized import quantization_of
from kvasir.quantization.formats.base import WeightFormat, refuse
from kvasir.quantization.formats.bitsandbytes import BitsAndBytes
from kvasir.quantization.formats.compressed_tensors import CompressedTensors
from kvasir.quantization.formats.floats import FP8, MXFP4
from kvasir.quantization.formats.integers import AWQ, GPTQ, AutoRound
from kvasir.quantization.formats.modelopt import ModelOpt

FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "mxfp4": MXFP4,
    "modelopt": ModelOpt,
    "auto-round": AutoRound,
    "bitsandbytes": BitsAndBytes,
}


def find_format(hf: Mapping[str, Any], directory: Path) -> WeightFormat | None:
    """The format of a checkpoint's weights; None: they are not quantized."""
    config = quantization_of(hf, directory)
    if config is None:
        return None
    method = config["quant_method"]
    if method not in FORMATS:
        raise refuse(f"quant_method {method!r} (there are {', '.join(FORMATS)})")
    return FORMATS[method](config)
