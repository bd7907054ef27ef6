"""Llama 1 to 3.x, and the many models that are one by another name."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.qkv:q",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.qkv:k",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.qkv:v",
    "model.layers.*.self_attn.o_proj": "layers.*.attention.o",
    "model.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "model.layers.*.mlp.gate_proj": "layers.*.mlp.gate_up:gate",
    "model.layers.*.mlp.up_proj": "layers.*.mlp.gate_up:up",
    "model.layers.*.mlp.down_proj": "layers.*.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}


def read_spec(config: Config) -> DecoderSpec:
    attention_bias = flag(config, "attention_bias")
    return read_decoder(config, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=flag(config, "mlp_bias"))


ARCHITECTURE = Architecture(read_spec, NAMES)
