"""GPT-J: attention and feed-forward behind one norm, neighbours rotated against each other, a bias on the logits."""

from __future__ import annotations

from kvasir.layers.rope import RopeSpec
from kvasir.models.architectures.gpt2 import OURS
from kvasir.models.config_reader import Config, flag, integer, real, renamed
from kvasir.models.spec import Architecture, DecoderSpec, read_activation, read_decoder

NAMES = {
    "transformer.wte": "embedding",
    "transformer.h.*.ln_1": "layers.*.attention_norm",
    "transformer.h.*.attn.q_proj": "layers.*.attention.qkv:q",
    "transformer.h.*.attn.k_proj": "layers.*.attention.qkv:k",
    "transformer.h.*.attn.v_proj": "layers.*.attention.qkv:v",
    "transformer.h.*.attn.out_proj": "layers.*.attention.o",
    "transformer.h.*.mlp.fc_in": "layers.*.mlp.up:up",
    "transformer.h.*.mlp.fc_out": "layers.*.mlp.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


def read_spec(config: Config) -> DecoderSpec:
    config = {**renamed(config, OURS), "num_key_value_heads": None}
    hidden_size, num_layers = integer(config, "hidden_size"), integer(config, "num_hidden_layers")
    config["intermediate_size"] = integer(config, "n_inner", 4 * hidden_size)
    tied = flag(config, "tie_word_embeddings")
    return read_decoder(
        config,
        ropes=(RopeSpec(integer(config, "rotary_dim", 64), interleaved=True),) * num_layers,
        norm="layer",
        norm_eps=real(config, "layer_norm_epsilon", 1e-5),
        parallel=True,
        shared_norm=True,
        gated=False,
        mlp_bias=True,
        activation=read_activation(config, "activation_function", "gelu_new"),
        tie_embeddings=tied,
        head_bias=not tied,
    )


ARCHITECTURE = Architecture(read_spec, NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"))
