"""StarCoder2."""

from __future__ import annotations

from kvasir.layers.spec import MLPSpec
from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag, integer
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_activation, read_attention, read_decoder, read_layer_norm, read_window

NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if ".mlp." not in name},
    "model.layers.*.mlp.c_fc": "layers.*.mlp.up:up",
    "model.layers.*.mlp.c_proj": "layers.*.mlp.down",
}


def read_spec(config: Config) -> DecoderSpec:
    """StarCoder2: Llama with LayerNorm, biases and a feed-forward network without a gate."""
    bias, norm = flag(config, "use_bias", True), read_layer_norm(config, "norm_epsilon")
    attention = read_attention(config, window=read_window(config), qkv_bias=bias, o_bias=bias)
    activation = read_activation(config, default="gelu_pytorch_tanh")
    mlp = MLPSpec(integer(config, "intermediate_size"), activation, bias)
    tied = flag(config, "tie_word_embeddings", True)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=tied)


ARCHITECTURE = Architecture(read_spec, NAMES)
