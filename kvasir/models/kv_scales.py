"""Scales for a cache of 8-bit floats that a checkpoint brings, under the names that vLLM reads: one number a layer for
keys and one for values, by which they are divided before they are stored. Worker process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kvasir.errors import ModelError
from kvasir.layers.attention import Attention
from kvasir.log import get_logger
from kvasir.models.checkpoint import Safetensors

logger = get_logger(__name__)

KV_SCALES = ("*.k_scale", "*.v_scale")
_NAME = re.compile(r"\.(\d+)\.[a-z_]*attn(?:\.attn|\.[kv]_proj|\.qkv_proj)?\.([kv]_scale)$")


def load_kv_scales(checkpoint: Safetensors, attentions: Sequence[Attention]) -> None:
    """Give each layer its scales; a layer without any keeps 1."""
    found = {name: match for name in checkpoint.entries if (match := _NAME.search(name))}
    for name, tensor in checkpoint.read(found):
        layer, which = int(found[name][1]), found[name][2]
        value = float(tensor) if tensor.numel() == 1 else math.nan
        if not (math.isfinite(value) and value > 0 and layer < len(attentions)):
            raise ModelError(
                f"{name} in {checkpoint.entries[name].file.name} should be one positive number, the scale of a layer's "
                f"cache; it is {tensor.flatten()[:4].tolist()}. Leave kv_cache_dtype at auto to do without it."
            )
        setattr(attentions[layer], which, value)
    logger.info("8-bit KV cache: %d scales from the checkpoint, 1.0 for the rest", len(found))
