"""T5's encoder by itself, as sentence-T5 and GTR embed with it: RMS norms before, scores that are not scaled, and a
bias by distance that all layers share."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import EncoderAttentionSpec, GatedMLPSpec, MLPSpec, RelativeBiasSpec, RMSNormSpec
from kvasir.models.config_reader import integer, read_activation, read_decoder, real, renamed
from kvasir.models.spec import Architecture, Config, DecoderSpec, Names, pre_norm

_ATTENTION = "encoder.block.*.layer.0.SelfAttention"
_MLP = "encoder.block.*.layer.1.DenseReluDense"
_NAMES = {
    "shared": "embedding",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "biases.*",
    "encoder.block.*.layer.0.layer_norm": "layers.*.attention_norm",
    f"{_ATTENTION}.q": "layers.*.attention.qkv:q",
    f"{_ATTENTION}.k": "layers.*.attention.qkv:k",
    f"{_ATTENTION}.v": "layers.*.attention.qkv:v",
    f"{_ATTENTION}.o": "layers.*.attention.o",
    "encoder.block.*.layer.1.layer_norm": "layers.*.mlp_norm",
    f"{_MLP}.wo": "layers.*.mlp.down",
    "encoder.final_layer_norm": "norm",
}


def _feed_forward(config: Config) -> tuple[bool, str]:
    """Whether it has a gate, and its activation."""
    kind = config.get("feed_forward_proj") or "relu"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: feed_forward_proj must be a text, but is {kind!r}.")
    gated, _, name = kind.rpartition("-")
    name = "gelu_new" if kind == "gated-gelu" else name  # as transformers reads it
    return gated == "gated", read_activation({"activation": name}, "activation")


def _names(config: Config) -> Names:
    if _feed_forward(config)[0]:
        return {**_NAMES, f"{_MLP}.wi_0": "layers.*.mlp.gate_up:gate", f"{_MLP}.wi_1": "layers.*.mlp.gate_up:up"}
    return {**_NAMES, f"{_MLP}.wi": "layers.*.mlp.up:up"}


def read_t5(config: Config) -> DecoderSpec:
    """T5's encoder (sentence-T5, GTR): RMS norms before, scores that are not scaled, with a bias by distance."""
    names = {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
    config = renamed(config, names)
    heads, inner = integer(config, "num_attention_heads"), integer(config, "d_ff")
    buckets = integer(config, "relative_attention_num_buckets", 32)
    bias = RelativeBiasSpec(buckets, integer(config, "relative_attention_max_distance", 128))
    attention = EncoderAttentionSpec(heads, heads, integer(config, "d_kv"), scale=1.0, relative_bias=bias)
    norm = RMSNormSpec(real(config, "layer_norm_epsilon", 1e-6))
    gated, activation = _feed_forward(config)
    mlp = GatedMLPSpec(inner, activation) if gated else MLPSpec(inner, activation)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=False, has_head=False)


# All names but the embedding's begin with the prefix, so none is put before them.
T5 = Architecture(read_t5, _names, ignored=("encoder.embed_tokens.weight",), prefix="encoder.", pooling="mean")
