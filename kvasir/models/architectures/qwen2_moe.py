"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts on most layers, beside one for every token."""

from __future__ import annotations

from dataclasses import replace

from kvasir.models.architectures import qwen2
from kvasir.models.architectures.llama import NAMES as LLAMA_NAMES
from kvasir.models.config_reader import Config, flag, integer, listed
from kvasir.models.spec import Architecture, DecoderSpec, MoESpec

ROUTED = {
    "model.layers.*.mlp.gate": "layers.*.mlp.router",
    "model.layers.*.mlp.experts.*.gate_proj": "layers.*.mlp.experts:gate.*",
    "model.layers.*.mlp.experts.*.up_proj": "layers.*.mlp.experts:up.*",
    "model.layers.*.mlp.experts.*.down_proj": "layers.*.mlp.experts:down.*",
}
NAMES = {
    **LLAMA_NAMES,  # layers without experts are as Llama's
    **ROUTED,
    "model.layers.*.mlp.shared_expert.gate_proj": "layers.*.mlp.shared.gate_up:gate",
    "model.layers.*.mlp.shared_expert.up_proj": "layers.*.mlp.shared.gate_up:up",
    "model.layers.*.mlp.shared_expert.down_proj": "layers.*.mlp.shared.down",
    "model.layers.*.mlp.shared_expert_gate": "layers.*.mlp.shared_gate",
}


def read_moe(config: Config, *, top_k: int, shared_size: int | None) -> MoESpec:
    """Experts on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step, dense = integer(config, "decoder_sparse_step", 1), listed(config, "mlp_only_layers", int) or []
    layers = range(integer(config, "num_hidden_layers"))
    return MoESpec(
        num_experts=integer(config, "num_experts", config.get("num_local_experts")),
        top_k=integer(config, "num_experts_per_tok", top_k),
        intermediate_size=integer(config, "moe_intermediate_size"),
        normalise=flag(config, "norm_topk_prob"),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in layers),
        shared_size=shared_size,
    )


def read_spec(config: Config) -> DecoderSpec:
    shared_size = integer(config, "shared_expert_intermediate_size")
    spec = replace(qwen2.read_spec(config), moe=read_moe(config, top_k=4, shared_size=shared_size))
    return replace(spec, qkv_bias=flag(config, "qkv_bias", True))


ARCHITECTURE = Architecture(read_spec, NAMES)
