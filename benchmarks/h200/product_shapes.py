"""Which small products a model has, for tune_products.py: from its config.json, or written out. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.models import registry
from kvasir.models.spec import DecoderSpec

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
    return list(dict.fromkeys(_products(registry.find(config).read_spec(config))))


def _products(spec: DecoderSpec) -> Iterator[Product]:
    """Experts are not among them: theirs are grouped products."""
    hidden, attended = spec.hidden_size, spec.num_heads * spec.head_dim
    fuses, sums = _fuses(spec), _sums_parts(spec)
    yield Product("norm" if fuses else "plain", attended + 2 * spec.num_kv_heads * spec.head_dim, hidden)
    yield Product("add" if fuses else "plain", hidden, attended, sums)
    if spec.moe is None or not all(spec.moe.layers):
        width = spec.intermediate_size
        yield Product("gated" if fuses else "plain", 2 * width if spec.gated else width, hidden)
        yield Product("add" if fuses else "plain", hidden, width, sums)
    yield Product("plain", spec.vocab_size, spec.embedding_size or hidden)


# Both of these repeat what kvasir/models/decoder_layer.py decides; a test holds them equal.


def _sums_parts(spec: DecoderSpec) -> bool:
    """Whether what o and down give goes nowhere but into a norm that adds it to the residual."""
    plain = spec.norm_place == "before" and spec.norm.startswith("rms") and spec.final_norm
    return plain and spec.residual_scale == 1.0 and not (spec.parallel or spec.shared_norm)


def _fuses(spec: DecoderSpec) -> bool:
    """Whether one row takes norms, activation and residual on its way through the products."""
    inner = (spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size)
    fits = spec.moe is None and all(n % 512 == 0 for n in inner)
    return fits and _sums_parts(spec) and spec.gated and spec.activation == "silu"


def parse(written: str) -> Product:
    """norm:4096x1024: kind, outputs, inputs."""
    found = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+)x(\d+)", written.strip())
    if found is None:
        raise SystemExit(f"{written}: a shape is written kind:OUTPUTSxINPUTS, with a kind of {', '.join(KINDS)}")
    kind, rows, inner = found.groups()
    return Product(kind, int(rows), int(inner), kind == "add")
