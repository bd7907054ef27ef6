"""Llama, on whose names and parts most other architectures build, and its relatives: Mistral, Mixtral, Cohere's Command
and others. They differ in scales, norms, biases, or the names and layout of their tensors.
"""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import MLPSpec, MoESpec, RopeSpec, TopKRoutingSpec
from kvasir.models.config_reader import (
    check_length,
    flag,
    head_dim_of,
    integer,
    listed,
    mapping,
    read_activation,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_layer_norm,
    read_rms_norm,
    read_rope,
    read_window,
    real,
    windows_by_type,
)
from kvasir.models.spec import (
    GATE_UP,
    QKV,
    Architecture,
    Config,
    DecoderSpec,
    Names,
    TensorLayout,
    grouped_qkv,
    halves,
    output_norm,
    parallel,
    pre_norm,
    stacked_qkv,
    vary_attention,
)

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.qkv:q",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.qkv:k",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.qkv:v",
    "model.layers.*.self_attn.o_proj": "layers.*.attention.o",
    "model.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "model.layers.*.mlp.gate_proj": "layers.*.mlp.gate_up:gate",
    "model.layers.*.mlp.up_proj": "layers.*.mlp.gate_up:up",
    "model.layers.*.mlp.down_proj": "layers.*.mlp.down",
    "model.norm": "norm",
    "lm_head": "head",
}
MIXTRAL_NAMES = {
    **{name: ours for name, ours in NAMES.items() if ".mlp." not in name},
    "model.layers.*.block_sparse_moe.gate": "layers.*.mlp.router",
    "model.layers.*.block_sparse_moe.experts.*.w1": "layers.*.mlp.experts:gate.*",
    "model.layers.*.block_sparse_moe.experts.*.w3": "layers.*.mlp.experts:up.*",
    "model.layers.*.block_sparse_moe.experts.*.w2": "layers.*.mlp.experts:down.*",
}
COHERE_NAMES = {name: ours for name, ours in NAMES.items() if ours != "layers.*.mlp_norm"}


def read_llama(config: Config) -> DecoderSpec:
    """Llama 1 to 3.x, and the many models with the same architecture under another name."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    mlp = read_gated_mlp(config, bias=flag(config, "mlp_bias"))
    return read_decoder(config, pre_norm(norm, attention, mlp), norm)


def read_llama_bidirectional(config: Config) -> DecoderSpec:
    """Llama whose tokens see later ones too, as NVIDIA's embedding models and rerankers have it."""
    return read_llama({**config, "is_causal": False})


def read_granite(config: Config) -> DecoderSpec:
    """Granite: Llama with multipliers on embeddings, scores, residuals and logits."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    scale = real(config, "attention_multiplier", 1.0)
    attention = read_attention(config, scale=scale, qkv_bias=bias, o_bias=bias)
    mlp = read_gated_mlp(config, bias=flag(config, "mlp_bias"))
    return read_decoder(
        config,
        pre_norm(norm, attention, mlp, residual_scale=real(config, "residual_multiplier", 1.0)),
        norm,
        embedding_scale=real(config, "embedding_multiplier", 1.0),
        logit_scale=1.0 / real(config, "logits_scaling", 1.0),
    )


def read_smollm3(config: Config) -> DecoderSpec:
    """SmolLM3: Llama with some layers that do not rotate positions."""
    bias, num_layers = flag(config, "attention_bias"), integer(config, "num_hidden_layers")
    interval = integer(config, "no_rope_layer_interval", 4)
    # The name misleads: a one means that the layer rotates.
    rotates = listed(config, "no_rope_layers", int) or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    check_length("no_rope_layers", len(rotates), num_layers)
    rope, norm = read_rope(config, head_dim_of(config), theta=2e6), read_rms_norm(config)
    window, types = read_window(config), listed(config, "layer_types", str)
    if types is None:  # where the file lists them, transformers asks nothing else
        slides = flag(config, "use_sliding_window") and window is not None
        types = ["sliding_attention" if slides and not on else "full_attention" for on in rotates]
    windows = windows_by_type({**config, "layer_types": types}, window)
    attention = read_attention(config, rope=rope, qkv_bias=bias, o_bias=bias)
    layer = pre_norm(norm, attention, read_gated_mlp(config, bias=flag(config, "mlp_bias")))
    layers = vary_attention(layer, rope=[rope if on else None for on in rotates], window=windows)
    return read_decoder(config, layers, norm, tie_embeddings=flag(config, "tie_word_embeddings", True))


INTERNLM2_NAMES: dict[str, str | TensorLayout] = {
    "model.tok_embeddings": "embedding",
    "model.layers.*.attention_norm": "layers.*.attention_norm",
    "model.layers.*.attention.wqkv": TensorLayout(QKV, grouped_qkv),
    "model.layers.*.attention.wo": "layers.*.attention.o",
    "model.layers.*.ffn_norm": "layers.*.mlp_norm",
    "model.layers.*.feed_forward.w1": "layers.*.mlp.gate_up:gate",
    "model.layers.*.feed_forward.w3": "layers.*.mlp.gate_up:up",
    "model.layers.*.feed_forward.w2": "layers.*.mlp.down",
    "model.norm": "norm",
    "output": "head",
}


def read_internlm2(config: Config) -> DecoderSpec:
    """InternLM2: Llama under other names, with query, key and value heads fused in groups."""
    bias, norm = flag(config, "bias", True), read_rms_norm(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    return read_decoder(config, pre_norm(norm, attention, read_gated_mlp(config)), norm)


PHI3_NAMES: dict[str, str | TensorLayout] = {
    **{name: ours for name, ours in NAMES.items() if ".attention.qkv:" not in ours and ".gate_up:" not in ours},
    "model.layers.*.self_attn.qkv_proj": TensorLayout(QKV, stacked_qkv),
    "model.layers.*.mlp.gate_up_proj": TensorLayout(GATE_UP, halves),
}


def read_phi3(config: Config) -> DecoderSpec:
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices in the checkpoint, LongRoPE, partial rotation in some."""
    rope = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if "short_factor" in rope:  # the first files call LongRoPE "su" or "yarn"
        config = {**config, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": "longrope"}}
        if "original_max_position_embeddings" not in rope:
            config = {"original_max_position_embeddings": 4096, **config}
    norm, attention = read_rms_norm(config, 1e-5), read_attention(config, window=read_window(config))
    return read_decoder(config, pre_norm(norm, attention, read_gated_mlp(config)), norm)


OLMO2_NAMES = {
    **{name: ours for name, ours in NAMES.items() if not name.endswith("input_layernorm")},
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "model.layers.*.post_attention_layernorm": "layers.*.attention_post_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_post_norm",
}


def read_olmo2(config: Config) -> DecoderSpec:
    """OLMo 2: norms after attention and feed-forward, and a norm over all queries and one over all keys of a token."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config, 1e-5)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=norm, qk_norm_over="projection")
    return read_decoder(config, output_norm(norm, attention, read_gated_mlp(config)), norm)


def stablelm_names(config: Config) -> Names:
    parallel = flag(config, "use_parallel_residual")  # then there is one norm
    return {name: ours for name, ours in NAMES.items() if not (parallel and ours == "layers.*.mlp_norm")}


def read_stablelm(config: Config) -> DecoderSpec:
    """StableLM: Llama with LayerNorm and a part of each head rotated."""
    if flag(config, "qk_layernorm"):
        raise ModelError("config.json: qk_layernorm is not supported for this model; it must be false.")
    norm, rope = read_layer_norm(config), read_rope(config, head_dim_of(config), share=0.25)
    attention = read_attention(config, rope=rope, qkv_bias=flag(config, "use_qkv_bias"))
    arrange = parallel if flag(config, "use_parallel_residual") else pre_norm
    return read_decoder(config, arrange(norm, attention, read_gated_mlp(config)), norm)


STARCODER2_NAMES = {
    **{name: ours for name, ours in NAMES.items() if ".mlp." not in name},
    "model.layers.*.mlp.c_fc": "layers.*.mlp.up:up",
    "model.layers.*.mlp.c_proj": "layers.*.mlp.down",
}


def read_starcoder2(config: Config) -> DecoderSpec:
    """StarCoder2: Llama with LayerNorm, biases and a feed-forward network without a gate."""
    bias, norm = flag(config, "use_bias", True), read_layer_norm(config, "norm_epsilon")
    attention = read_attention(config, window=read_window(config), qkv_bias=bias, o_bias=bias)
    activation = read_activation(config, default="gelu_pytorch_tanh")
    mlp = MLPSpec(integer(config, "intermediate_size"), activation, bias)
    tied = flag(config, "tie_word_embeddings", True)
    return read_decoder(config, pre_norm(norm, attention, mlp), norm, tie_embeddings=tied)


LLAMA = Architecture(read_llama, NAMES)
LLAMA_BIDIRECTIONAL = Architecture(read_llama_bidirectional, NAMES, pooling="mean")
GRANITE = Architecture(read_granite, NAMES)
SMOLLM3 = Architecture(read_smollm3, NAMES)
INTERNLM2 = Architecture(read_internlm2, INTERNLM2_NAMES)
PHI3 = Architecture(read_phi3, PHI3_NAMES)
OLMO2 = Architecture(read_olmo2, OLMO2_NAMES)
STABLELM = Architecture(read_stablelm, stablelm_names)
STARCODER2 = Architecture(read_starcoder2, STARCODER2_NAMES)


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


MISTRAL = Architecture(read_mistral, NAMES)
MIXTRAL = Architecture(read_mixtral, MIXTRAL_NAMES)


def _read_command(config: Config, windows: tuple[int | None, ...], ropes: tuple[RopeSpec | None, ...]) -> DecoderSpec:
    if flag(config, "use_qk_norm"):
        raise ModelError("config.json: use_qk_norm is not supported for this model; set model_impl='transformers'.")
    bias, norm = flag(config, "attention_bias"), read_layer_norm(config, bias=False)
    attention = read_attention(config, rope=None, qkv_bias=bias, o_bias=bias)
    return read_decoder(
        config,
        vary_attention(parallel(norm, attention, read_gated_mlp(config)), window=windows, rope=ropes),
        norm,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        logit_scale=real(config, "logit_scale", 0.0625),
    )


def read_cohere(config: Config) -> DecoderSpec:
    """Cohere's Command-R: attention and feed-forward in parallel behind one LayerNorm without a bias, interleaved
    rotation, scaled logits."""
    rope = read_rope(config, head_dim_of(config), theta=500000.0, interleaved=True)
    num_layers = integer(config, "num_hidden_layers")
    return _read_command(config, (None,) * num_layers, (rope,) * num_layers)


def read_cohere2(config: Config) -> DecoderSpec:
    """Cohere's Command-R7B and Command-A: Command-R with a sliding window on most layers; layers without one do not
    rotate positions."""
    window, pattern = integer(config, "sliding_window", 4096), integer(config, "sliding_window_pattern", 4)
    windows = windows_by_type(config, window, pattern)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return _read_command(config, windows, tuple(None if window is None else rope for window in windows))


COHERE = Architecture(read_cohere, COHERE_NAMES)
COHERE2 = Architecture(read_cohere2, COHERE_NAMES)
