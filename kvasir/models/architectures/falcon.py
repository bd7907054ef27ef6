"""Falcon."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import MLPSpec
from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, Names, parallel, pre_norm
from kvasir.models.spec_reader import read_activation, read_attention, read_decoder, read_layer_norm
from kvasir.models.tensor_layout import QKV, TensorLayout, grouped_qkv

COMMON: dict[str, str | TensorLayout] = {
    "transformer.word_embeddings": "embedding",
    "transformer.h.*.self_attention.query_key_value": TensorLayout(QKV, grouped_qkv),
    "transformer.h.*.self_attention.dense": "layers.*.attention.o",
    "transformer.h.*.mlp.dense_h_to_4h": "layers.*.mlp.up:up",
    "transformer.h.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


def _two_norms(config: Config) -> bool:
    new = flag(config, "new_decoder_architecture")
    return integer(config, "num_ln_in_parallel_attn", 2 if new else 1) == 2


def read_names(config: Config) -> Names:
    if _two_norms(config):
        norms = {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"}
    else:
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    return COMMON | {f"transformer.h.*.{theirs}": f"layers.*.{ours}" for theirs, ours in norms.items()}


def read_spec(config: Config) -> DecoderSpec:
    """Falcon: attention and feed-forward in parallel; one key head in the first models, several in later ones."""
    if flag(config, "alibi"):
        raise ModelError("config.json: alibi is not supported; models that rotate positions are.")
    new, bias = flag(config, "new_decoder_architecture"), flag(config, "bias")
    old_names = {"n_head": "num_attention_heads", "n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers"}
    config = renamed(config, old_names)
    grouped = new or not flag(config, "multi_query", True)
    heads = integer(config, "num_attention_heads")
    config["num_key_value_heads"] = integer(config, "num_kv_heads", heads) if grouped else 1
    inner = integer(config, "ffn_hidden_size", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation", "gelu"), bias)
    norm, attention = read_layer_norm(config, "layer_norm_epsilon"), read_attention(config, qkv_bias=bias, o_bias=bias)
    tied = flag(config, "tie_word_embeddings", True)
    if new or flag(config, "parallel_attn", True):
        layer = parallel(norm, attention, mlp, one_norm=not _two_norms(config))
        return read_decoder(config, layer, norm, tie_embeddings=tied)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=tied)


ARCHITECTURE = Architecture(read_spec, read_names)
