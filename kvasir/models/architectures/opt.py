"""OPT."""

from __future__ import annotations

from kvasir.layers.spec import LayerNormSpec, MLPSpec
from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, LayerSpec, PostNormLayerSpec, pre_norm
from kvasir.models.spec_reader import read_activation, read_attention, read_decoder

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
    """OPT: learned positions that begin at the third entry, LayerNorm, and one size whose norms follow the sums."""
    config = {**renamed(config, {"ffn_dim": "intermediate_size"}), "num_key_value_heads": None}
    bias, before = flag(config, "enable_bias", True), flag(config, "do_layer_norm_before", True)
    norm, attention = LayerNormSpec(1e-5), read_attention(config, rope=None, qkv_bias=bias, o_bias=bias)
    activation = read_activation(config, "activation_function", "relu")
    mlp = MLPSpec(integer(config, "intermediate_size"), activation, bias)
    layer: LayerSpec = pre_norm(norm, attention, mlp)
    if not before:
        layer = PostNormLayerSpec(attention, mlp, attention_post_norm=norm, mlp_post_norm=norm)
    return read_decoder(
        config,
        layer,
        norm if before and not flag(config, "_remove_final_layer_norm") else None,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_size=integer(config, "word_embed_proj_dim", integer(config, "hidden_size")),
        num_positions=integer(config, "max_position_embeddings"),
        position_offset=2,
    )


ARCHITECTURE = Architecture(read_spec, read_names, prefix="model.")
