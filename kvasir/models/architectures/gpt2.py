"""GPT-2."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import MLPSpec
from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_activation, read_attention, read_decoder, read_layer_norm
from kvasir.models.tensor_layout import QKV, TensorLayout, stacked_qkv

NAMES: dict[str, str | TensorLayout] = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.h.*.ln_1": "layers.*.attention_norm",
    "transformer.h.*.attn.c_attn": TensorLayout(QKV, stacked_qkv, transposed=True),
    "transformer.h.*.attn.c_proj": TensorLayout(("layers.*.attention.o",), transposed=True),
    "transformer.h.*.ln_2": "layers.*.mlp_norm",
    "transformer.h.*.mlp.c_fc": TensorLayout(("layers.*.mlp.up:up",), transposed=True),
    "transformer.h.*.mlp.c_proj": TensorLayout(("layers.*.mlp.down",), transposed=True),
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
ENTRIES = {  # names in config.json -> the usual ones
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def read_spec(config: Config) -> DecoderSpec:
    """GPT-2: learned positions, LayerNorm, and matrices that are transposed in the checkpoint."""
    if flag(config, "scale_attn_by_inverse_layer_idx"):
        raise ModelError("config.json: scale_attn_by_inverse_layer_idx is not supported.")
    config = {**renamed(config, ENTRIES), "num_key_value_heads": None}
    inner = integer(config, "n_inner", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation_function", "gelu_new"), bias=True)
    scale = None if flag(config, "scale_attn_weights", True) else 1.0
    attention = read_attention(config, rope=None, scale=scale, qkv_bias=True, o_bias=True)
    norm = read_layer_norm(config, "layer_norm_epsilon")
    return read_decoder(
        config,
        pre_norm(norm, attention, mlp),
        norm,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        num_positions=integer(config, "max_position_embeddings"),
    )


ARCHITECTURE = Architecture(read_spec, NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"), prefix="transformer.")
