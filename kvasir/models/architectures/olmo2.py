"""OLMo 2."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, output_norm
from kvasir.models.spec_reader import read_attention, read_decoder, read_gated_mlp, read_rms_norm

NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if not name.endswith("input_layernorm")},
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "model.layers.*.post_attention_layernorm": "layers.*.attention_post_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_post_norm",
}


def read_spec(config: Config) -> DecoderSpec:
    """OLMo 2: norms after attention and feed-forward, and a norm over all queries and one over all keys of a token."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config, 1e-5)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=norm, qk_norm_over="projection")
    return read_decoder(config, output_norm(norm, attention, read_gated_mlp(config)), norm)


ARCHITECTURE = Architecture(read_spec, NAMES)
