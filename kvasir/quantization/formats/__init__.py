"""The formats of quantized checkpoints, by the `quant_method` of their config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import ModelError
from kvasir.quantization.formats.base import WeightFormat, refuse
from kvasir.quantization.formats.bitsandbytes import BitsAndBytes
from kvasir.quantization.formats.compressed_tensors import CompressedTensors
from kvasir.quantization.formats.floats import FP8, MXFP4, ModelOpt
from kvasir.quantization.formats.integers import AWQ, GPTQ, AutoRound

FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "mxfp4": MXFP4,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "auto-round": AutoRound,
    "intel/auto-round": AutoRound,
    "bitsandbytes": BitsAndBytes,
}


def config_of(hf: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    """The quantization config of a checkpoint: in config.json, or in a file of ModelOpt's beside it."""
    config = hf.get("quantization_config") or hf.get("compression_config")
    if config is not None:
        if not isinstance(config, Mapping):
            raise refuse(f"quantization_config in config.json is {config!r:.80}")
        return config
    file = directory / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {**found, "quant_method": "modelopt"}
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}); download it again.") from error


def find_format(hf: Mapping[str, Any], directory: Path) -> WeightFormat | None:
    """The format of a checkpoint's weights; None: they are not quantized."""
    config = config_of(hf, directory)
    if config is None:
        return None
    method = str(config.get("quant_method") or ("modelopt" if config.get("quant_algo") else "unknown")).lower()
    if method not in FORMATS:
        raise refuse(f"quant_method {method!r} (there are {', '.join(FORMATS)})")
    return FORMATS[method](config)
