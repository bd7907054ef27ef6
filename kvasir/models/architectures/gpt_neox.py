"""GPT-NeoX and Pythia."""

from __future__ import annotations

from kvasir.layers.spec import MLPSpec
from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, parallel, pre_norm
from kvasir.models.spec_reader import (
    head_dim_of,
    read_activation,
    read_attention,
    read_decoder,
    read_layer_norm,
    read_rope,
)
from kvasir.models.tensor_layout import QKV, TensorLayout, grouped_qkv

NAMES: dict[str, str | TensorLayout] = {
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.layers.*.input_layernorm": "layers.*.attention_norm",
    "gpt_neox.layers.*.attention.query_key_value": TensorLayout(QKV, grouped_qkv),
    "gpt_neox.layers.*.attention.dense": "layers.*.attention.o",
    "gpt_neox.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up:up",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "gpt_neox.final_layer_norm": "norm",
    "embed_out": "head",
}
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def read_spec(config: Config) -> DecoderSpec:
    """GPT-NeoX and Pythia: attention and feed-forward in parallel, part of each head rotated, fused heads."""
    config = {**config, "num_key_value_heads": None}
    named = renamed(config, {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"})
    bias, norm = flag(config, "attention_bias", True), read_layer_norm(config)
    rope = read_rope(named, head_dim_of(config), share=0.25)
    attention = read_attention(config, rope=rope, qkv_bias=bias, o_bias=bias)
    mlp = MLPSpec(integer(config, "intermediate_size"), read_activation(config, default="gelu"), bias=True)
    if flag(config, "use_parallel_residual", True):
        return read_decoder(config, parallel(norm, attention, mlp, one_norm=False), norm)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm)


ARCHITECTURE = Architecture(read_spec, NAMES, IGNORED)
