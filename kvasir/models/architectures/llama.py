"""Llama, on whose names and parts most other architectures build, and its near relatives: they differ in scales, norms,
biases, or the names and layout of their tensors."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import MLPSpec
from kvasir.models.config_reader import (
    check_length,
    flag,
    head_dim_of,
    integer,
    listed,
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


def read_llama(config: Config) -> DecoderSpec:
    """Llama 1 to 3.x, and the many models with the same architecture under another name."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    mlp = read_gated_mlp(config, bias=flag(config, "mlp_bias"))
    return read_decoder(config, pre_norm(norm, attention, mlp), norm)


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
    window = integer(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    types = listed(config, "layer_types", str) or ["full_attention" if on else "sliding_attention" for on in rotates]
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
        raise ModelError("config.json: qk_layernorm is not supported for this model; set model_impl='transformers'.")
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
GRANITE = Architecture(read_granite, NAMES)
SMOLLM3 = Architecture(read_smollm3, NAMES)
INTERNLM2 = Architecture(read_internlm2, INTERNLM2_NAMES)
PHI3 = Architecture(read_phi3, PHI3_NAMES)
OLMO2 = Architecture(read_olmo2, OLMO2_NAMES)
STABLELM = Architecture(read_stablelm, stablelm_names)
STARCODER2 = Architecture(read_starcoder2, STARCODER2_NAMES)
