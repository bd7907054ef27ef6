"""OLMo 2: norms after attention and feed-forward, and over all queries and all keys as one vector."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder

NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if not name.endswith("input_layernorm")},
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "model.layers.*.post_attention_layernorm": "layers.*.attention_post_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_post_norm",
}


def read_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    return read_decoder(
        config,
        norm_eps=real(config, "rms_norm_eps", 1e-5),
        norm_place="after",
        qk_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
