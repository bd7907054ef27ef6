"""Cohere's Command models."""

from __future__ import annotations

from kvasir.errors import ModelError
from kvasir.layers.spec import RopeSpec
from kvasir.models.architectures import llama
from kvasir.models.config_reader import (
    flag,
    head_dim_of,
    integer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_layer_norm,
    read_rope,
    real,
    windows_by_type,
)
from kvasir.models.spec import Architecture, Config, DecoderSpec, parallel, vary_attention

NAMES = {name: ours for name, ours in llama.NAMES.items() if ours != "layers.*.mlp_norm"}


def _read(config: Config, windows: tuple[int | None, ...], ropes: tuple[RopeSpec | None, ...]) -> DecoderSpec:
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
    return _read(config, (None,) * num_layers, (rope,) * num_layers)


def read_cohere2(config: Config) -> DecoderSpec:
    """Cohere's Command-R7B and Command-A: Command-R with a sliding window on most layers; layers without one do not
    rotate positions."""
    window, pattern = integer(config, "sliding_window", 4096), integer(config, "sliding_window_pattern", 4)
    windows = windows_by_type(config, window, pattern)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return _read(config, windows, tuple(None if window is None else rope for window in windows))


COHERE = Architecture(read_cohere, NAMES)
COHERE2 = Architecture(read_cohere2, NAMES)
