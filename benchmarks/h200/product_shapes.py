"""Which small products a model has, for tune_products.py: from its config.json, or written out. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.layers.spec import GatedMLPSpec, MoESpec, RMSNormSpec
from kvasir.models import architectures
from kvasir.models.spec import DecoderSpec, LayerSpec

KINDS = ("plain", "norm", "add", "gated")


@dataclass(frozen=True)
class Product:
    kind: str  # how one row goes through it: see kernels.fused_linear
    rows: int  # outputs
    inner: int  # inputs
    leaves_parts: bool = False  # whether a norm comes next, which can sum parts


# Models that need no file.
KNOWN = {
    "qwen3-0.6b": [
        Product("norm", 4096, 1024), Product("add", 1024, 2048, True), Product("gated", 6144, 1024),
        Product("add", 1024, 3072, True), Product("plain", 151936, 1024),
    ],
    "llama-3.1-8b": [
        Product("norm", 6144, 4096), Product("add", 4096, 4096, True), Product("gated", 28672, 4096),
        Product("add", 4096, 14336, True), Product("plain", 128256, 4096),
    ],
}  # fmt: skip


def products_of(model: str) -> list[Product]:
    """Of one of KNOWN, a model's directory, or a name on the Hugging Face hub."""
    return KNOWN[model] if model in KNOWN else products_of_config(read_config(model))


def read_config(model: str) -> dict[str, Any]:
    path = Path(model)
    if not path.exists():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            raise SystemExit(f"{model} is no model of {', '.join(KNOWN)}, no directory and no name on the hub")
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model, "config.json"))
    path = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"{model} has no config.json") from None
    return config


def products_of_config(config: Mapping[str, Any]) -> list[Product]:
    return list(dict.fromkeys(_products(architectures.find(config).read_spec(config))))


def _products(spec: DecoderSpec) -> Iterator[Product]:
    """Experts are not among them: their products are grouped."""
    hidden = spec.hidden_size
    for layer in dict.fromkeys(spec.layers):
        attention, mlp = layer.attention, layer.mlp
        fuses, sums = _fuses(layer, hidden), _sums_parts(layer, spec)
        attended = attention.heads * attention.head_dim
        yield Product("norm" if fuses else "plain", attended + 2 * attention.kv_heads * attention.head_dim, hidden)
        yield Product("add" if fuses else "plain", hidden, attended, sums)
        if not isinstance(mlp, MoESpec):
            width = mlp.intermediate_size
            up = 2 * width if isinstance(mlp, GatedMLPSpec) else width
            yield Product("gated" if fuses else "plain", up, hidden)
            yield Product("add" if fuses else "plain", hidden, width, sums)
    yield Product("plain", spec.vocab_size, spec.embedding_size or hidden)


# Both of these repeat what kvasir/models/transformer.py decides; a test compares them.


def _sums_parts(layer: LayerSpec, spec: DecoderSpec) -> bool:
    """Whether the results of o and down go into norms that add them to the residual."""
    norms = (layer.attention_norm, layer.mlp_norm, spec.final_norm)
    return _adds_directly(layer) and all(isinstance(norm, RMSNormSpec) for norm in norms)


def _adds_directly(layer: LayerSpec) -> bool:
    bare = layer.attention_post_norm is layer.mlp_post_norm is None
    return type(layer) is LayerSpec and bare and layer.residual_scale == 1.0


def _fuses(layer: LayerSpec, hidden: int) -> bool:
    """Whether norms, activation and residual of one row are computed inside the products."""
    norms = (layer.attention_norm, layer.mlp_norm)
    if not (_adds_directly(layer) and all(isinstance(norm, RMSNormSpec) for norm in norms)):
        return False
    if not (isinstance(layer.mlp, GatedMLPSpec) and layer.mlp.activation == "silu"):
        return False
    inner = (hidden, layer.attention.heads * layer.attention.head_dim, layer.mlp.intermediate_size)
    return all(size % 512 == 0 for size in inner)


def parse(written: str) -> Product:
    """norm:4096x1024: kind, outputs, inputs."""
    found = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+)x(\d+)", written.strip())
    if found is None:
        raise SystemExit(f"{written}: a shape is written kind:OUTPUTSxINPUTS, with a kind of {', '.join(KINDS)}")
    kind, rows, inner = found.groups()
    return Product(kind, int(rows), int(inner), kind == "add")
