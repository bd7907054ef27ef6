"""Gemma 1, 2 and 3 (the text model)."""

from __future__ import annotations

from kvasir.layers.spec import AttentionSpec, GatedMLPSpec, RMSNormSpec, RopeSpec
from kvasir.models.architectures import llama
from kvasir.models.config_reader import (
    both_directions,
    flag,
    head_dim_of,
    integer,
    mapping,
    optional_real,
    read_activation,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_rms_norm,
    read_rope,
    real,
    refuse_others,
    rope_entries,
    windows_by_type,
)
from kvasir.models.spec import (
    Architecture,
    Config,
    DecoderSpec,
    LayerSpec,
    pre_norm,
    sandwich_norm,
    vary_attention,
)

NAMES = llama.NAMES
NAMES2 = {
    **llama.NAMES,
    "model.layers.*.post_attention_layernorm": "layers.*.attention_post_norm",
    "model.layers.*.pre_feedforward_layernorm": "layers.*.mlp_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_post_norm",
}
NAMES3 = {
    **NAMES2,
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def read_gemma(config: Config) -> DecoderSpec:
    """Gemma 1: Llama with scaled embeddings, norm gains stored minus one, and GELU in the gate."""
    refuse_others(config, {"use_bidirectional_attention": False})
    # The first files say "gelu" and mean the approximation by tanh.
    named = config.get("hidden_act") or config.get("hidden_activation")
    attention, mlp, norm = _parts({**config, "hidden_activation": None if named == "gelu" else named})
    return _decoder(config, pre_norm(norm, attention, mlp), norm)


def read_gemma2(config: Config) -> DecoderSpec:
    """Gemma 2: norms before and after attention and feed-forward, a sliding window on every other layer, soft caps on
    scores and logits."""
    refuse_others(config, {"use_bidirectional_attention": False})
    capped = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}  # a null means none
    attention, mlp, norm = _parts(config)
    layer = sandwich_norm(norm, attention, mlp).with_attention(
        scale=real(config, "query_pre_attn_scalar", 256) ** -0.5,
        softcap=optional_real(capped, "attn_logit_softcapping"),
    )
    windows = windows_by_type(config, integer(config, "sliding_window", 4096), pattern=2)
    logit_softcap = optional_real(capped, "final_logit_softcapping")
    return _decoder(config, vary_attention(layer, window=windows), norm, logit_softcap)


def read_gemma3(config: Config) -> DecoderSpec:
    """Gemma 3, the text model: Gemma 2 with norms on queries and keys instead of soft caps, five layers with a sliding
    window to one without, and a different rotation for each of the two kinds."""
    near, far = _ropes(config)
    attention, mlp, norm = _parts(config, rope=near)
    layer = sandwich_norm(norm, attention, mlp).with_attention(
        qk_norm=norm,
        scale=real(config, "query_pre_attn_scalar", 256) ** -0.5,
    )  # the scores have no soft cap, whatever attn_logit_softcapping says: transformers reads it and computes without
    window, pattern = integer(config, "sliding_window", 4096), integer(config, "sliding_window_pattern", 6)
    windows = windows_by_type(config, window, pattern)
    layers = vary_attention(layer, window=windows, rope=[far if window is None else near for window in windows])
    if flag(config, "use_bidirectional_attention"):
        layers = tuple(both_directions(each, share=2) for each in layers)  # half a window before, half after
    return _decoder(config, layers, norm, optional_real(config, "final_logit_softcapping"))


def _parts(config: Config, **options: RopeSpec) -> tuple[AttentionSpec, GatedMLPSpec, RMSNormSpec]:
    bias, activation = flag(config, "attention_bias"), read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return (
        read_attention(config, head_dim=256, qkv_bias=bias, o_bias=bias, **options),
        read_gated_mlp(config, activation=activation),
        read_rms_norm(config, plus_one=True),
    )


def _decoder(
    config: Config, layers: LayerSpec | tuple[LayerSpec, ...], norm: RMSNormSpec, logit_softcap: float | None = None
) -> DecoderSpec:
    return read_decoder(
        config,
        layers,
        norm,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        logit_softcap=logit_softcap,
    )


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of layers with a window and of those without: two entries in new files, two thetas in old ones."""
    head_dim, near_theta = head_dim_of(config, 256), real(config, "rope_local_base_freq", 10000.0)
    near = {"rope_parameters": mapping(config, "rope_parameters").get("sliding_attention")}
    far = {"rope_parameters": rope_entries(config, "full_attention")}
    old = {"rope_scaling": None, "rope_theta": None}  # entries for layers without a window, which `far` has
    return (
        read_rope({**config, **old, **near}, head_dim, theta=near_theta),
        read_rope({**config, **old, **far}, head_dim, theta=real(config, "rope_theta", 1e6)),
    )


GEMMA = Architecture(read_gemma, NAMES)
GEMMA2 = Architecture(read_gemma2, NAMES2)
GEMMA3 = Architecture(read_gemma3, NAMES3)
