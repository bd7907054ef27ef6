"""Llama, on whose names and parts most other architectures build."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_attention, read_decoder, read_gated_mlp, read_rms_norm

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
    """Llama 1 to 3.x, and the many models with the same architecture under another name."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    mlp = read_gated_mlp(config, bias=flag(config, "mlp_bias"))
    return read_decoder(config, pre_norm(norm, attention, mlp), norm)


ARCHITECTURE = Architecture(read_spec, NAMES)
