"""GPT-NeoX and Pythia: attention and feed-forward side by side, part of each head rotated, fused heads."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag, real, renamed
from kvasir.models.fused import QKV, Stored, grouped_qkv
from kvasir.models.spec import Architecture, DecoderSpec, read_activation, read_decoder, same_ropes

NAMES: dict[str, str | Stored] = {
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.layers.*.input_layernorm": "layers.*.attention_norm",
    "gpt_neox.layers.*.attention.query_key_value": Stored(QKV, grouped_qkv),
    "gpt_neox.layers.*.attention.dense": "layers.*.attention.o",
    "gpt_neox.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up:up",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "gpt_neox.final_layer_norm": "norm",
    "embed_out": "head",
}
IGNORED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def read_spec(config: Config) -> DecoderSpec:
    config = {**config, "num_key_value_heads": None}
    named = renamed(config, {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"})
    bias = flag(config, "attention_bias", True)
    return read_decoder(
        config,
        ropes=same_ropes(named, share=0.25),
        norm="layer",
        norm_eps=real(config, "layer_norm_eps", 1e-5),
        parallel=flag(config, "use_parallel_residual", True),
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        mlp_bias=True,
        activation=read_activation(config, default="gelu"),
    )


ARCHITECTURE = Architecture(read_spec, NAMES, IGNORED)
