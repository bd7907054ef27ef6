"""GPT-2: learned positions, LayerNorm, matrices that stand transposed in the checkpoint."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.models.config_reader import Config, flag, integer, real, renamed
from kvasir.models.fused import QKV, Stored, stacked_qkv
from kvasir.models.spec import Architecture, DecoderSpec, read_activation, read_decoder

NAMES: dict[str, str | Stored] = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.h.*.ln_1": "layers.*.attention_norm",
    "transformer.h.*.attn.c_attn": Stored(QKV, stacked_qkv, transposed=True),
    "transformer.h.*.attn.c_proj": Stored(("layers.*.attention.o",), transposed=True),
    "transformer.h.*.ln_2": "layers.*.mlp_norm",
    "transformer.h.*.mlp.c_fc": Stored(("layers.*.mlp.up:up",), transposed=True),
    "transformer.h.*.mlp.c_proj": Stored(("layers.*.mlp.down",), transposed=True),
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
OURS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def read_spec(config: Config) -> DecoderSpec:
    if flag(config, "scale_attn_by_inverse_layer_idx"):
        raise ModelError("config.json: scale_attn_by_inverse_layer_idx is not supported.")
    config = {**renamed(config, OURS), "num_key_value_heads": None}
    config["intermediate_size"] = integer(config, "n_inner", 4 * integer(config, "hidden_size"))
    return read_decoder(
        config,
        ropes=(None,) * integer(config, "num_hidden_layers"),
        norm="layer",
        norm_eps=real(config, "layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        o_bias=True,
        attention_scale=None if flag(config, "scale_attn_weights", True) else 1.0,
        gated=False,
        mlp_bias=True,
        activation=read_activation(config, "activation_function", "gelu_new"),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        num_positions=integer(config, "max_position_embeddings"),
    )


ARCHITECTURE = Architecture(read_spec, NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"), prefix="transformer.")
