"""Mixtral: Mistral with experts in place of every feed-forward network."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, integer, real
from kvasir.models.spec import Architecture, DecoderSpec, MoESpec, one_window, read_decoder, same_ropes

NAMES = {
    **{name: ours for name, ours in llama.NAMES.items() if ".mlp." not in name},
    "model.layers.*.block_sparse_moe.gate": "layers.*.mlp.router",
    "model.layers.*.block_sparse_moe.experts.*.w1": "layers.*.mlp.experts:gate.*",
    "model.layers.*.block_sparse_moe.experts.*.w3": "layers.*.mlp.experts:up.*",
    "model.layers.*.block_sparse_moe.experts.*.w2": "layers.*.mlp.experts:down.*",
}


def read_spec(config: Config) -> DecoderSpec:
    moe = MoESpec(
        num_experts=integer(config, "num_local_experts", 8),
        top_k=integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "intermediate_size"),
        normalise=True,
        layers=(True,) * integer(config, "num_hidden_layers"),
    )
    return read_decoder(
        config,
        ropes=same_ropes(config, theta=1e6),
        norm_eps=real(config, "rms_norm_eps", 1e-5),
        windows=one_window(config),
        moe=moe,
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
