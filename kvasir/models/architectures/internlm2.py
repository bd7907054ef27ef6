"""InternLM2: Llama under other names, with query, key and value heads fused in groups."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag
from kvasir.models.fused import QKV, Stored, grouped_qkv
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder

NAMES: dict[str, str | Stored] = {
    "model.tok_embeddings": "embedding",
    "model.layers.*.attention_norm": "layers.*.attention_norm",
    "model.layers.*.attention.wqkv": Stored(QKV, grouped_qkv),
    "model.layers.*.attention.wo": "layers.*.attention.o",
    "model.layers.*.ffn_norm": "layers.*.mlp_norm",
    "model.layers.*.feed_forward.w1": "layers.*.mlp.gate_up:gate",
    "model.layers.*.feed_forward.w3": "layers.*.mlp.gate_up:up",
    "model.layers.*.feed_forward.w2": "layers.*.mlp.down",
    "model.norm": "norm",
    "output": "head",
}


def read_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "bias", True)
    return read_decoder(config, qkv_bias=bias, o_bias=bias)


ARCHITECTURE = Architecture(read_spec, NAMES)
