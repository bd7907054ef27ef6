"""Where a checkpoint says how its weights are quantized: in config.json, or in a file beside it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import ModelError

# Files of tools that leave config.json as it was, and the format that each means if it names none.
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# Other names of formats.
_SAME = {
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8",
}


def quantization_of(hf: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    """Return the quantization config of a checkpoint, with its `quant_method`; None: its weights are not quantized."""
    config = hf.get("quantization_config") or hf.get("compression_config")
    if config is not None:
        if not isinstance(config, Mapping):
            raise ModelError(
                f"quantization_config in config.json is {config!r:.80}, but should be a mapping. Download it again."
            )
        return {**config, "quant_method": _method(config, "unknown")}
    for name, method in _BESIDE.items():
        if (file := directory / name).is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
                return {**found, "quant_method": _method(found, method)}
            except (ValueError, TypeError, AttributeError) as error:
                raise ModelError(f"{file} is not readable JSON ({error}); download it again.") from error
    return None


def _method(config: Mapping[str, Any], default: str) -> str:
    given = config.get("quant_method")
    if given is None and config.get("quant_algo"):
        given = "modelopt"
    if given is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        given = "bitsandbytes"
    name = str(given or default).lower()
    return _SAME.get(name, name)
