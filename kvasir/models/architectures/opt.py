"""OPT: learned positions that begin at the third entry, LayerNorm, and one size whose norms come last."""

from __future__ import annotations

from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, read_activation, read_decoder

COMMON = {
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "positions",
    "model.decoder.project_in": "project_in",
    "model.decoder.project_out": "project_out",
    "model.decoder.layers.*.self_attn.q_proj": "layers.*.attention.qkv:q",
    "model.decoder.layers.*.self_attn.k_proj": "layers.*.attention.qkv:k",
    "model.decoder.layers.*.self_attn.v_proj": "layers.*.attention.qkv:v",
    "model.decoder.layers.*.self_attn.out_proj": "layers.*.attention.o",
    "model.decoder.layers.*.fc1": "layers.*.mlp.up:up",
    "model.decoder.layers.*.fc2": "layers.*.mlp.down",
    "model.decoder.final_layer_norm": "norm",
    "lm_head": "head",
}


def read_names(config: Config) -> dict[str, str]:
    kind = "norm" if flag(config, "do_layer_norm_before", True) else "post_norm"
    return {
        **COMMON,
        "model.decoder.layers.*.self_attn_layer_norm": f"layers.*.attention_{kind}",
        "model.decoder.layers.*.final_layer_norm": f"layers.*.mlp_{kind}",
    }


def read_spec(config: Config) -> DecoderSpec:
    config = {**renamed(config, {"ffn_dim": "intermediate_size"}), "num_key_value_heads": None}
    bias, before = flag(config, "enable_bias", True), flag(config, "do_layer_norm_before", True)
    return read_decoder(
        config,
        ropes=(None,) * integer(config, "num_hidden_layers"),
        norm="layer",
        norm_eps=1e-5,
        norm_place="before" if before else "sum",
        final_norm=before and not flag(config, "_remove_final_layer_norm"),
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        mlp_bias=bias,
        activation=read_activation(config, "activation_function", "relu"),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_size=integer(config, "word_embed_proj_dim", integer(config, "hidden_size")),
        num_positions=integer(config, "max_position_embeddings"),
        position_offset=2,
    )


ARCHITECTURE = Architecture(read_spec, read_names, prefix="model.")
