"""Mixtures of experts that differ from Llama and from each other in how experts are chosen and kept: OLMoE,
Phi-3.5-MoE, Granite-MoE, DBRX, GLM-4.5, MiniMax-M2, Llama 4, gpt-oss."""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelError
from kvasir.layers.spec import (
    AttentionSpec,
    ClampedSwiGLU,
    GatedMLPSpec,
    LayerNormSpec,
    MoESpec,
    RMSNormSpec,
    SharedExpertSpec,
    SparseMixerRoutingSpec,
    TemperatureSpec,
    TopKRoutingSpec,
)
from kvasir.models.architectures import deepseek, llama, qwen
from kvasir.models.config_reader import (
    check_length,
    flag,
    head_dim_of,
    integer,
    listed,
    mapping,
    optional_real,
    read_activation,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_layer_norm,
    read_rms_norm,
    read_rope,
    read_window,
    real,
    refuse_others,
    renamed,
    windows_by_type,
)
from kvasir.models.spec import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    QKV,
    Architecture,
    Config,
    DecoderSpec,
    Names,
    TensorLayout,
    by_turns,
    halves,
    pre_norm,
    stacked_qkv,
    vary_attention,
)

_ATTENTION = {name: ours for name, ours in llama.NAMES.items() if ".mlp." not in name}
_QK_NORMS = {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}

# ---------------------------------------------------------------- OLMoE


def read_olmoe(config: Config) -> DecoderSpec:
    """OLMoE: a mixture of experts with a norm over all queries and one over all keys of a token."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config, 1e-5)
    attention = read_attention(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm,
        qk_norm_over="projection",
        clip=optional_real(config, "clip_qkv"),
    )
    experts = MoESpec(
        integer(config, "num_experts", 64),
        integer(config, "intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", 8), flag(config, "norm_topk_prob")),
        read_activation(config),
    )
    return read_decoder(config, pre_norm(norm, attention, experts), norm)


OLMOE = Architecture(read_olmoe, {**_ATTENTION, **_QK_NORMS, **qwen.EXPERTS})

# ---------------------------------------------------------------- Phi-3.5-MoE


def read_phimoe(config: Config) -> DecoderSpec:
    """Phi-3.5-MoE: two experts a token, weighed among those that are nearly as good, behind LayerNorm."""
    if integer(config, "num_experts_per_tok", 2) != 2:
        raise ModelError("config.json: this model's router chooses two experts, and num_experts_per_tok is not 2.")
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if "long_mscale" in given and given.get("attention_factor") is None:
        if real(given, "long_mscale") != real(given, "short_mscale"):
            raise ModelError("config.json: long_mscale and short_mscale differ, which is not supported.")
        config = {**config, "rope_parameters": {**given, "attention_factor": real(given, "long_mscale")}}
    bias, norm = flag(config, "attention_bias"), LayerNormSpec(real(config, "rms_norm_eps", 1e-5))
    rope = read_rope(config, head_dim_of(config), theta=1e6)
    attention = read_attention(config, rope=rope, window=read_window(config), qkv_bias=bias, o_bias=bias)
    experts = MoESpec(
        integer(config, "num_local_experts", 16),
        integer(config, "intermediate_size"),
        SparseMixerRoutingSpec(real(config, "router_jitter_noise", 0.01)),
        read_activation(config),
    )
    return read_decoder(config, pre_norm(norm, attention, experts), norm, head_bias=flag(config, "lm_head_bias"))


PHIMOE = Architecture(read_phimoe, llama.MIXTRAL_NAMES)

# ---------------------------------------------------------------- Granite-MoE

GRANITE_MOE_NAMES: dict[str, str | TensorLayout] = {
    **_ATTENTION,
    "model.layers.*.block_sparse_moe.router.layer": "layers.*.mlp.router",
    "model.layers.*.block_sparse_moe.input_linear": TensorLayout(EXPERT_GATE_UP, halves, stacked="entries"),
    "model.layers.*.block_sparse_moe.output_linear": TensorLayout(EXPERT_DOWN, stacked="entries"),
    "model.layers.*.shared_mlp.input_linear": TensorLayout(
        ("layers.*.mlp.shared.gate_up:gate", "layers.*.mlp.shared.gate_up:up"), halves
    ),
    "model.layers.*.shared_mlp.output_linear": "layers.*.mlp.shared.down",
}


def read_granite_moe(config: Config) -> DecoderSpec:
    """Granite-MoE, with or without a shared expert: Granite with a mixture of experts in every layer."""
    dense = llama.read_granite(config)
    shared, activation = config.get("shared_intermediate_size"), read_activation(config)
    experts = MoESpec(
        integer(config, "num_local_experts", 8),
        integer(config, "intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", 2), normalise=True),
        activation,
        None if not shared else SharedExpertSpec(GatedMLPSpec(integer(config, "shared_intermediate_size"), activation)),
    )
    return dense.with_mlps([experts] * len(dense.layers))


GRANITEMOE = GRANITEMOESHARED = Architecture(read_granite_moe, GRANITE_MOE_NAMES)

# ---------------------------------------------------------------- DBRX

DBRX_NAMES: dict[str, str | TensorLayout] = {
    "transformer.wte": "embedding",
    "transformer.blocks.*.norm_attn_norm.norm_1": "layers.*.attention_norm",
    "transformer.blocks.*.norm_attn_norm.attn.Wqkv": TensorLayout(QKV, stacked_qkv),
    "transformer.blocks.*.norm_attn_norm.attn.out_proj": "layers.*.attention.o",
    "transformer.blocks.*.norm_attn_norm.norm_2": "layers.*.mlp_norm",
    "transformer.blocks.*.ffn.router.layer": "layers.*.mlp.router",
    "transformer.blocks.*.ffn.experts.mlp.w1": TensorLayout(EXPERT_GATE_UP[:1], stacked="rows", bare=True),
    "transformer.blocks.*.ffn.experts.mlp.v1": TensorLayout(EXPERT_GATE_UP[1:], stacked="rows", bare=True),
    "transformer.blocks.*.ffn.experts.mlp.w2": TensorLayout(EXPERT_DOWN, transposed=True, stacked="rows", bare=True),
    "transformer.norm_f": "norm",
    "lm_head": "head",
}
_DBRX_ENTRIES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}


def read_dbrx(config: Config) -> DecoderSpec:
    """DBRX: many small experts behind LayerNorm without a bias; queries, keys and values are clipped."""
    config, attend, feed = renamed(config, _DBRX_ENTRIES), mapping(config, "attn_config"), mapping(config, "ffn_config")
    config["num_key_value_heads"] = integer(attend, "kv_n_heads", 1)
    order = optional_real({"moe_normalize_expert_weights": 1.0, **feed}, "moe_normalize_expert_weights")
    if order not in (None, 1.0):
        raise ModelError(f"config.json: moe_normalize_expert_weights {order:g} is not supported; 1 and null are.")
    norm = read_layer_norm(config, bias=False)
    rope = read_rope(config, head_dim_of(config), theta=real(attend, "rope_theta", 10000.0))
    attention = read_attention(config, rope=rope, clip=optional_real(attend, "clip_qkv"))
    experts = MoESpec(
        integer(feed, "moe_num_experts", 4),
        integer(feed, "ffn_hidden_size", 3584),
        TopKRoutingSpec(integer(feed, "moe_top_k", 1), normalise=order is not None),
        read_activation(mapping(feed, "ffn_act_fn"), "name"),
    )
    return read_decoder(config, pre_norm(norm, attention, experts), norm)


DBRX = Architecture(read_dbrx, DBRX_NAMES)

# ---------------------------------------------------------------- GLM-4.5


def glm4_names(config: Config) -> Names:
    return {**llama.NAMES, **_QK_NORMS, **qwen.EXPERTS, **deepseek.SHARED_EXPERTS, **deepseek.CORRECTION}


def read_glm4_moe(config: Config) -> DecoderSpec:
    """GLM-4.5 and 4.6: DeepSeek-V3's experts behind plain attention, half of each head rotated."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config, 1e-5)
    rope = read_rope(config, head_dim_of(config), share=0.5)
    qk_norm = norm if flag(config, "use_qk_norm") else None
    attention = read_attention(config, rope=rope, qkv_bias=bias, qk_norm=qk_norm)
    dense = pre_norm(norm, attention, read_gated_mlp(config))
    config = {"n_shared_experts": 1, **config}
    sparse = pre_norm(norm, attention, deepseek.read_experts(config, deepseek.read_corrected_routing(config)))
    first, count = integer(config, "first_k_dense_replace", 1, least=0), integer(config, "num_hidden_layers")
    return read_decoder(config, [dense if index < first else sparse for index in range(count)], norm)


GLM4_MOE = Architecture(read_glm4_moe, glm4_names, deepseek.ignored)

# ---------------------------------------------------------------- MiniMax-M2

MINIMAX_M2_NAMES: dict[str, str | TensorLayout] = {
    **llama.MIXTRAL_NAMES,
    **_QK_NORMS,
    "model.layers.*.block_sparse_moe.e_score_correction_bias": TensorLayout(("layers.*.mlp.routing",), bare=True),
}


_MINIMAX_M2_OTHERS: dict[str, object] = {  # options of the code that came with the first checkpoints
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def read_minimax_m2(config: Config) -> DecoderSpec:
    """MiniMax-M2: experts chosen by sigmoid and a learned correction, norms over all queries and all keys, part of each
    head rotated."""
    refuse_others(config, _MINIMAX_M2_OTHERS)
    norm, head_dim = read_rms_norm(config), head_dim_of(config, 128)
    share = integer(config, "rotary_dim", head_dim) / head_dim
    rope = read_rope(config, head_dim, theta=5e6, share=share)
    attention = read_attention(config, head_dim=128, rope=rope, qk_norm=norm, qk_norm_over="projection")
    routing = TopKRoutingSpec(integer(config, "num_experts_per_tok", 8), True, "sigmoid", correction=True)
    experts = MoESpec(
        integer(config, "num_local_experts"), integer(config, "intermediate_size"), routing, read_activation(config)
    )
    return read_decoder(config, pre_norm(norm, attention, experts), norm)


MINIMAX_M2 = Architecture(read_minimax_m2, MINIMAX_M2_NAMES, deepseek.ignored)

# ---------------------------------------------------------------- Llama 4

LLAMA4_NAMES: dict[str, str | TensorLayout] = {
    **_ATTENTION,
    **{name.replace(".mlp.", ".feed_forward."): ours for name, ours in llama.NAMES.items() if ".mlp." in name},
    "model.layers.*.feed_forward.router": "layers.*.mlp.router",
    "model.layers.*.feed_forward.experts.gate_up_proj": TensorLayout(
        EXPERT_GATE_UP, halves, transposed=True, stacked="entries", bare=True
    ),
    "model.layers.*.feed_forward.experts.down_proj": TensorLayout(
        EXPERT_DOWN, transposed=True, stacked="entries", bare=True
    ),
    "model.layers.*.feed_forward.shared_expert.gate_proj": "layers.*.mlp.shared.gate_up:gate",
    "model.layers.*.feed_forward.shared_expert.up_proj": "layers.*.mlp.shared.gate_up:up",
    "model.layers.*.feed_forward.shared_expert.down_proj": "layers.*.mlp.shared.down",
}


def read_llama4(config: Config) -> DecoderSpec:
    """Llama 4, the text model: experts whose inputs are weighed, beside a shared one; layers that rotate positions
    attend within a chunk (`max_model_len` up to one chunk), the others sharpen attention over long texts."""
    bias, norm, activation = flag(config, "attention_bias"), read_rms_norm(config, 1e-5), read_activation(config)
    rope = read_rope(config, head_dim_of(config, 128), theta=5e5, interleaved=True)
    attention = read_attention(config, head_dim=128, rope=rope, qkv_bias=bias, o_bias=bias)
    dense = GatedMLPSpec(integer(config, "intermediate_size_mlp", 16384), activation)
    experts = MoESpec(
        integer(config, "num_local_experts", 16),
        integer(config, "intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", 1), scoring="sigmoid"),
        activation,
        SharedExpertSpec(GatedMLPSpec(integer(config, "intermediate_size"), activation)),
        weighs_inputs=True,
    )
    varied = _llama4_attention(config, attention, norm)
    spec = read_decoder(config, vary_attention(pre_norm(norm, attention, dense), **varied), norm)
    step, count = integer(config, "interleave_moe_layer_step", 1), len(spec.layers)
    listed_layers = listed(config, "moe_layers", int)
    sparse = range(step - 1, count, step) if listed_layers is None else listed_layers
    return spec.with_mlps([experts if index in sparse else dense for index in range(count)])


def _llama4_attention(config: Config, attention: AttentionSpec, norm: RMSNormSpec) -> dict[str, list[Any]]:
    """What differs from layer to layer. Most layers rotate; the others have neither norms nor chunks."""
    count, interval = integer(config, "num_hidden_layers"), integer(config, "no_rope_layer_interval", 4)
    # The name misleads: a one means that the layer rotates.
    rotates = listed(config, "no_rope_layers", int) or [(layer + 1) % interval != 0 for layer in range(count)]
    check_length("no_rope_layers", len(rotates), count)
    types = listed(config, "layer_types", str)
    types = types or ["chunked_attention" if on else "full_attention" for on in rotates]
    check_length("layer_types", len(types), count)
    if unknown := set(types) - {"chunked_attention", "full_attention"}:
        raise ModelError(f"config.json: layer type {unknown.pop()!r} is not supported for this model.")
    # A norm without a gain commutes with rotation, which it follows in this model.
    bare = RMSNormSpec(norm.eps, has_gain=False) if flag(config, "use_qk_norm", True) else None
    heat: TemperatureSpec | None = None
    if flag(config, "attn_temperature_tuning", True):
        heat = TemperatureSpec(real(config, "attn_scale", 0.1), integer(config, "floor_scale", 8192))
    chunk = integer(config, "attention_chunk_size", 8192)
    return {
        "rope": [attention.rope if on else None for on in rotates],
        "qk_norm": [bare if on else None for on in rotates],
        "temperature": [None if on else heat for on in rotates],
        "chunk": [chunk if kind == "chunked_attention" else None for kind in types],
    }


LLAMA4 = Architecture(read_llama4, LLAMA4_NAMES)

# ---------------------------------------------------------------- gpt-oss

GPT_OSS_NAMES: dict[str, str | TensorLayout] = {
    **_ATTENTION,
    "model.layers.*.self_attn.sinks": TensorLayout(("layers.*.attention.sinks",), bare=True),
    "model.layers.*.mlp.router": "layers.*.mlp.router",
    "model.layers.*.mlp.experts.gate_up_proj": TensorLayout(
        EXPERT_GATE_UP, by_turns, transposed=True, stacked="entries", bare=True
    ),
    "model.layers.*.mlp.experts.down_proj": TensorLayout(EXPERT_DOWN, transposed=True, stacked="entries", bare=True),
}
_GPT_OSS_MXFP4: dict[str, str | TensorLayout] = {  # its experts' matrices are [outputs, inputs]
    "model.layers.*.mlp.experts.gate_up_proj": TensorLayout(EXPERT_GATE_UP, by_turns, stacked="rows", bare=True),
    "model.layers.*.mlp.experts.down_proj": TensorLayout(EXPERT_DOWN, stacked="rows", bare=True),
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_names(config: Config) -> Names:
    quantization = mapping(config, "quantization_config")
    return {**GPT_OSS_NAMES, **(_GPT_OSS_MXFP4 if quantization.get("quant_method") == "mxfp4" else {})}


def read_gpt_oss(config: Config) -> DecoderSpec:
    """gpt-oss, in MXFP4 or unquantized: attention sinks, a sliding window on every other layer, experts with biases and
    a clamped gate."""
    bias, norm = flag(config, "attention_bias", True), read_rms_norm(config, 1e-5)
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if not ("rope_type" in given or "type" in given):
        config = {**config, "rope_parameters": {**_GPT_OSS_ROPE, **given}}
    rope = read_rope(config, head_dim_of(config, 64), theta=150000.0)
    attention = read_attention(config, head_dim=64, rope=rope, qkv_bias=bias, o_bias=bias, sinks=True)
    experts = MoESpec(
        integer(config, "num_local_experts"),
        integer(config, "intermediate_size"),
        TopKRoutingSpec(integer(config, "num_experts_per_tok", 4), normalise=True),
        ClampedSwiGLU(real(config, "swiglu_alpha", 1.702), real(config, "swiglu_limit", 7.0)),
        bias=True,
        router_bias=True,
    )
    windows = windows_by_type(config, read_window(config, 128), pattern=2)
    return read_decoder(config, vary_attention(pre_norm(norm, attention, experts), window=windows), norm)


GPT_OSS = Architecture(read_gpt_oss, gpt_oss_names)
