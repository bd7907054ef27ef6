"""Falcon: attention and feed-forward side by side; one key head in the first models, groups of heads in the later."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.models.config_reader import Config, flag, integer, real, renamed
from kvasir.models.fused import QKV, Stored, grouped_qkv
from kvasir.models.spec import Architecture, DecoderSpec, Names, read_activation, read_decoder

COMMON: dict[str, str | Stored] = {
    "transformer.word_embeddings": "embedding",
    "transformer.h.*.self_attention.query_key_value": Stored(QKV, grouped_qkv),
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
    if flag(config, "alibi"):
        raise ModelError("config.json: alibi is not supported; models that rotate positions are.")
    new, bias = flag(config, "new_decoder_architecture"), flag(config, "bias")
    old_names = {"n_head": "num_attention_heads", "n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers"}
    config = renamed(config, old_names)
    config["intermediate_size"] = integer(config, "ffn_hidden_size", 4 * integer(config, "hidden_size"))
    heads = integer(config, "num_attention_heads")
    grouped = new or not flag(config, "multi_query", True)
    config["num_key_value_heads"] = integer(config, "num_kv_heads", heads) if grouped else 1
    parallel = new or flag(config, "parallel_attn", True)
    return read_decoder(
        config,
        norm="layer",
        norm_eps=real(config, "layer_norm_epsilon", 1e-5),
        parallel=parallel,
        shared_norm=parallel and not _two_norms(config),
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        mlp_bias=bias,
        activation=read_activation(config, "activation", "gelu"),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
    )


ARCHITECTURE = Architecture(read_spec, read_names)
