"""Qwen 2 and 3, dense and as mixtures of experts."""

from __future__ import annotations

from kvasir.layers.spec import GatedMLPSpec, MoESpec, SharedExpertSpec, TopKRoutingSpec
from kvasir.models.architectures import llama
from kvasir.models.config_reader import (
    flag,
    head_dim_of,
    integer,
    listed,
    read_activation,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_layer_windows,
    read_rms_norm,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, pre_norm, vary_attention

NAMES3 = {
    **llama.NAMES,
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}
EXPERTS = {  # layers without experts have Llama's names
    "model.layers.*.mlp.gate": "layers.*.mlp.router",
    "model.layers.*.mlp.experts.*.gate_proj": "layers.*.mlp.experts:gate.*",
    "model.layers.*.mlp.experts.*.up_proj": "layers.*.mlp.experts:up.*",
    "model.layers.*.mlp.experts.*.down_proj": "layers.*.mlp.experts:down.*",
}
SHARED_EXPERT = {
    "model.layers.*.mlp.shared_expert.gate_proj": "layers.*.mlp.shared.gate_up:gate",
    "model.layers.*.mlp.shared_expert.up_proj": "layers.*.mlp.shared.gate_up:up",
    "model.layers.*.mlp.shared_expert.down_proj": "layers.*.mlp.shared.down",
    "model.layers.*.mlp.shared_expert_gate": "layers.*.mlp.shared_gate",
}


def read_qwen2(config: Config, qkv_bias: bool = True) -> DecoderSpec:
    """Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional sliding windows on the upper
    layers."""
    norm, attention = read_rms_norm(config), read_attention(config, qkv_bias=qkv_bias)
    layer = pre_norm(norm, attention, read_gated_mlp(config))
    return read_decoder(config, vary_attention(layer, window=read_layer_windows(config)), norm)


def read_qwen3(config: Config) -> DecoderSpec:
    """Qwen3: Llama with a norm on each query and key head before it is rotated."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    attention = read_attention(config, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=norm)
    layer = pre_norm(norm, attention, read_gated_mlp(config))
    return read_decoder(config, vary_attention(layer, window=read_layer_windows(config)), norm)


def _with_types(config: Config) -> Config:
    """Add the layer types of Qwen2-MoE. Unlike in Qwen2, every other one of the *lower* layers has the window."""
    if config.get("layer_types") is not None:
        return config
    first, slides = integer(config, "max_window_layers", 28, least=0), flag(config, "use_sliding_window")
    near = [slides and layer % 2 == 0 and layer < first for layer in range(integer(config, "num_hidden_layers"))]
    return {**config, "layer_types": ["sliding_attention" if each else "full_attention" for each in near]}


def read_qwen2_moe(config: Config) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts on most layers, beside a shared expert."""
    mlp = GatedMLPSpec(integer(config, "shared_expert_intermediate_size"), read_activation(config))
    shared = SharedExpertSpec(mlp, gated=True)
    dense = read_qwen2(_with_types(config), flag(config, "qkv_bias", True))
    return _with_experts(config, dense, top_k=4, shared=shared)


def read_qwen3_moe(config: Config) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with experts on most layers."""
    # The default of the heads' size is not Qwen3's 128, and if there is a window, every layer has it.
    config = {**config, "head_dim": head_dim_of(config), "layer_types": None, "max_window_layers": 0}
    return _with_experts(config, read_qwen3(config), top_k=8)


def _with_experts(
    config: Config, spec: DecoderSpec, *, top_k: int, shared: SharedExpertSpec | None = None
) -> DecoderSpec:
    """Experts on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step, dense = integer(config, "decoder_sparse_step", 1), listed(config, "mlp_only_layers", int) or []
    experts = MoESpec(
        integer(config, "num_experts", config.get("num_local_experts")),
        integer(config, "moe_intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", top_k), flag(config, "norm_topk_prob")),
        read_activation(config),
        shared,
    )
    return spec.with_mlps(
        [
            experts if (index + 1) % step == 0 and index not in dense else layer.mlp
            for index, layer in enumerate(spec.layers)
        ]
    )


QWEN2 = Architecture(read_qwen2, llama.NAMES)
QWEN3 = Architecture(read_qwen3, NAMES3)
QWEN2_MOE = Architecture(read_qwen2_moe, {**llama.NAMES, **EXPERTS, **SHARED_EXPERT})
QWEN3_MOE = Architecture(read_qwen3_moe, {**NAMES3, **EXPERTS})
