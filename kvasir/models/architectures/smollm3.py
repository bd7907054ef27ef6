"""SmolLM3."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config, flag, integer, listed
from kvasir.models.spec import Architecture, DecoderSpec, check_length, pre_norm, vary_attention
from kvasir.models.spec_reader import (
    head_dim_of,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_rms_norm,
    read_rope,
    windows_by_type,
)


def read_spec(config: Config) -> DecoderSpec:
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


ARCHITECTURE = Architecture(read_spec, NAMES)
