"""Mistral and Mixtral."""

from __future__ import annotations

from kvasir.layers.spec import MoESpec, TopKRoutingSpec
from kvasir.models.architectures import llama
from kvasir.models.config_reader import (
    head_dim_of,
    integer,
    read_activation,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_rms_norm,
    read_rope,
    read_window,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, pre_norm

MIXTRAL_NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if ".mlp." not in name},
    "model.layers.*.block_sparse_moe.gate": "layers.*.mlp.router",
    "model.layers.*.block_sparse_moe.experts.*.w1": "layers.*.mlp.experts:gate.*",
    "model.layers.*.block_sparse_moe.experts.*.w3": "layers.*.mlp.experts:up.*",
    "model.layers.*.block_sparse_moe.experts.*.w2": "layers.*.mlp.experts:down.*",
}


def read_mistral(config: Config) -> DecoderSpec:
    """Mistral: Llama, with a sliding window on every layer in the first versions."""
    norm, attention = read_rms_norm(config), read_attention(config, window=read_window(config, 4096))
    return read_decoder(config, pre_norm(norm, attention, read_gated_mlp(config)), norm)


def read_mixtral(config: Config) -> DecoderSpec:
    """Mixtral: Mistral with a mixture of experts as every feed-forward network."""
    norm, rope = read_rms_norm(config, 1e-5), read_rope(config, head_dim_of(config), theta=1e6)
    experts = MoESpec(
        integer(config, "num_local_experts", 8),
        integer(config, "intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", 2), normalise=True),
        read_activation(config),
    )
    attention = read_attention(config, rope=rope, window=read_window(config))
    return read_decoder(config, pre_norm(norm, attention, experts), norm)


MISTRAL = Architecture(read_mistral, llama.NAMES)
MIXTRAL = Architecture(read_mixtral, MIXTRAL_NAMES)
