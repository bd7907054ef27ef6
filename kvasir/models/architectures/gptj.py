"""GPT-J."""

from __future__ import annotations

from kvasir.layers.spec import MLPSpec, RopeSpec
from kvasir.models.architectures.gpt2 import ENTRIES
from kvasir.models.config_reader import Config, flag, integer, renamed
from kvasir.models.spec import Architecture, DecoderSpec, parallel
from kvasir.models.spec_reader import read_activation, read_attention, read_decoder, read_layer_norm

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
    """GPT-J: attention and feed-forward in parallel behind one norm, interleaved rotation, a bias on the logits."""
    config = {**renamed(config, ENTRIES), "num_key_value_heads": None}
    inner = integer(config, "n_inner", 4 * integer(config, "hidden_size"))
    mlp = MLPSpec(inner, read_activation(config, "activation_function", "gelu_new"), bias=True)
    norm, rope = (
        read_layer_norm(config, "layer_norm_epsilon"),
        RopeSpec(integer(config, "rotary_dim", 64), interleaved=True),
    )
    layer, tied = parallel(norm, read_attention(config, rope=rope), mlp), flag(config, "tie_word_embeddings")
    return read_decoder(config, layer, norm, tie_embeddings=tied, head_bias=not tied)


ARCHITECTURE = Architecture(read_spec, NAMES, ignored=("*.attn.bias", "*.attn.masked_bias"))
