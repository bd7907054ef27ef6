"""DeepSeek 2 and 3, whose attention caches one short vector for each token, and models of the same make."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import (
    ExpertGroups,
    GatedMLPSpec,
    LatentAttentionSpec,
    MoESpec,
    RMSNormSpec,
    SharedExpertSpec,
    TopKRoutingSpec,
)
from kvasir.models.architectures import llama, qwen
from kvasir.models.config_reader import (
    choice,
    flag,
    integer,
    read_activation,
    read_decoder,
    read_gated_mlp,
    read_rms_norm,
    read_rope,
    real,
    yarn_score_scale,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, Names, TensorLayout, pre_norm

NORM = RMSNormSpec(1e-6)  # of the short vectors, whatever config.json says of the other norms

# What transformers takes where a file has no such entry.
DEFAULTS3: dict[str, object] = {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
DEFAULTS3 |= {"routed_scaling_factor": 2.5}

SHARED_EXPERTS = {
    "model.layers.*.mlp.shared_experts.gate_proj": "layers.*.mlp.shared.gate_up:gate",
    "model.layers.*.mlp.shared_experts.up_proj": "layers.*.mlp.shared.gate_up:up",
    "model.layers.*.mlp.shared_experts.down_proj": "layers.*.mlp.shared.down",
}
CORRECTION = {
    "model.layers.*.mlp.gate.e_score_correction_bias": TensorLayout(("layers.*.mlp.routing",), bare=True),
}


def names(config: Config) -> Names:
    query = "q_proj" if _query_dim(config) is None else "q_a_proj"
    return {
        **{name: ours for name, ours in llama.NAMES.items() if ".qkv:" not in ours},
        **qwen.EXPERTS,
        **SHARED_EXPERTS,
        **CORRECTION,
        f"model.layers.*.self_attn.{query}": "layers.*.attention.down:q",
        "model.layers.*.self_attn.q_a_layernorm": "layers.*.attention.query_norm",
        "model.layers.*.self_attn.q_b_proj": "layers.*.attention.query_up:q",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "layers.*.attention.down:kv",
        "model.layers.*.self_attn.kv_a_layernorm": "layers.*.attention.latent_norm",
        "model.layers.*.self_attn.kv_b_proj": "layers.*.attention.latent_up",
    }


def _query_dim(config: Config) -> int | None:
    """The size of the short vector of queries. A null means that there is none."""
    rank = config.get("q_lora_rank", 1536)
    return None if rank is None else integer({"q_lora_rank": rank}, "q_lora_rank")


def ignored(config: Config) -> tuple[str, ...]:
    """Layers past the last one predict several tokens at once, which is not done here."""
    first, extra = integer(config, "num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    return "*.rotary_emb.inv_freq", *(f"model.layers.{first + index}.*" for index in range(extra))


def read_deepseek2(config: Config) -> DecoderSpec:
    """DeepSeek-V2 and V2-Lite: attention over a latent cache, experts chosen by softmax, beside shared ones."""
    if flag(config, "norm_topk_prob"):
        raise ModelError("config.json: norm_topk_prob is not supported for this model; no published one has it.")
    choice(config, "scoring_func", ("softmax",), "softmax")
    config = {"n_shared_experts": 2, **config}
    grouped = choice(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    routing = TopKRoutingSpec(
        integer(config, "num_experts_per_tok"),
        scale=real(config, "routed_scaling_factor", 1.0),
        groups=ExpertGroups(integer(config, "n_group"), integer(config, "topk_group")) if grouped else None,
    )
    return _read(config, routing, interleaved=True)


def read_deepseek3(config: Config) -> DecoderSpec:
    """DeepSeek-V3, V3.1 and R1, Kimi-K2: DeepSeek-V2 with experts chosen in groups, by sigmoid and a learned
    correction."""
    config = {**DEFAULTS3, **config}
    return _read(config, read_corrected_routing(config), flag(config, "rope_interleave", True))


def read_corrected_routing(config: Config) -> TopKRoutingSpec:
    """Experts chosen by sigmoid and correction, in groups that are as good as their best two experts."""
    choice(config, "scoring_func", ("sigmoid",), "sigmoid")
    choice(config, "topk_method", ("noaux_tc",), "noaux_tc")
    groups = ExpertGroups(integer(config, "n_group", 1), integer(config, "topk_group", 1), "best two")
    return TopKRoutingSpec(
        integer(config, "num_experts_per_tok", 8),
        flag(config, "norm_topk_prob", True),
        scoring="sigmoid",
        scale=real(config, "routed_scaling_factor", 1.0),
        groups=groups if groups.count > 1 else None,
        correction=True,
    )


def read_experts(config: Config, routing: TopKRoutingSpec) -> MoESpec:
    """Experts beside shared ones, which are one network of their common size."""
    inner, activation = integer(config, "moe_intermediate_size"), read_activation(config)
    shared = integer(config, "n_shared_experts", 0, least=0)
    return MoESpec(
        integer(config, "n_routed_experts"),
        inner,
        routing,
        activation,
        SharedExpertSpec(GatedMLPSpec(inner * shared, activation)) if shared else None,
    )


def _read(config: Config, routing: TopKRoutingSpec, interleaved: bool) -> DecoderSpec:
    norm, bias, rotated = read_rms_norm(config), flag(config, "attention_bias"), integer(config, "qk_rope_head_dim")
    rope = read_rope({**config, "head_dim": rotated}, rotated, interleaved=interleaved)
    plain = integer(config, "qk_nope_head_dim")
    attention = LatentAttentionSpec(
        heads=integer(config, "num_attention_heads"),
        latent_dim=integer(config, "kv_lora_rank"),
        plain_dim=plain,
        value_dim=integer(config, "v_head_dim"),
        rope=rope,
        scale=(plain + rotated) ** -0.5 * yarn_score_scale(rope, config),
        norm=NORM,
        query_dim=_query_dim(config),
        bias=bias,
    )
    dense = pre_norm(norm, attention, read_gated_mlp(config, bias=flag(config, "mlp_bias")))
    sparse = pre_norm(norm, attention, read_experts(config, routing))
    first, step = integer(config, "first_k_dense_replace", 0, least=0), integer(config, "moe_layer_freq", 1)
    layers = [
        sparse if index >= first and index % step == 0 else dense
        for index in range(integer(config, "num_hidden_layers"))
    ]
    return read_decoder(config, layers, norm)


DEEPSEEK_V2 = Architecture(read_deepseek2, names, ignored)
DEEPSEEK_V3 = Architecture(read_deepseek3, names, ignored)
