"""StarCoder2: Llama with LayerNorm, biases and a feed-forward network without a gate."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, one_window, read_activation, read_decoder

NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if ".mlp." not in name},
    "model.layers.*.mlp.c_fc": "layers.*.mlp.up:up",
    "model.layers.*.mlp.c_proj": "layers.*.mlp.down",
}


def read_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "use_bias", True)
    return read_decoder(
        config,
        windows=one_window(config),
        norm="layer",
        norm_eps=real(config, "norm_epsilon", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        mlp_bias=bias,
        activation=read_activation(config, default="gelu_pytorch_tanh"),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
