"""InternLM2."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_attention, read_decoder, read_gated_mlp, read_rms_norm
from kvasir.models.tensor_layout import QKV, TensorLayout, grouped_qkv

NAMES: dict[str, str | TensorLayout] = {
    "model.tok_embeddings": "embedding",
    "model.layers.*.attention_norm": "layers.*.attention_norm",
    "model.layers.*.attention.wqkv": TensorLayout(QKV, grouped_qkv),
    "model.layers.*.attention.wo": "layers.*.attention.o",
    "model.layers.*.ffn_norm": "layers.*.mlp_norm",
    "model.layers.*.feed_forward.w1": "layers.*.mlp.gate_up:gate",
    "model.layers.*.feed_forward.w3": "layers.*.mlp.gate_up:up",
    "model.layers.*.feed_forward.w2": "layers.*.mlp.down",
    "model.norm": "norm",
    "output": "head",
}


def read_spec(config: Config) -> DecoderSpec:
    """InternLM2: Llama under other names, with query, key and value heads fused in groups."""
    bias, norm = flag(config, "bias", True), read_rms_norm(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    return read_decoder(config, pre_norm(norm, attention, read_gated_mlp(config)), norm)


ARCHITECTURE = Architecture(read_spec, NAMES)
