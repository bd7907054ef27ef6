"""SmolLM3: Llama with some layers that do not rotate."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config, flag, integer, listed
from kvasir.models.rope import read_rope
from kvasir.models.spec import Architecture, DecoderSpec, head_dim_of, read_decoder, windows_by_type


def read_spec(config: Config) -> DecoderSpec:
    bias, num_layers = flag(config, "attention_bias"), integer(config, "num_hidden_layers")
    interval = integer(config, "no_rope_layer_interval", 4)
    # The name misleads: a one means that the layer rotates.
    rotates = listed(config, "no_rope_layers", int) or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    rope = read_rope(config, head_dim_of(config), theta=2e6)
    window = integer(config, "sliding_window", 4096) if flag(config, "use_sliding_window") else None
    types = listed(config, "layer_types", str) or ["full_attention" if on else "sliding_attention" for on in rotates]
    return read_decoder(
        config,
        ropes=tuple(rope if on else None for on in rotates),
        windows=windows_by_type({**config, "layer_types": types}, window),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
