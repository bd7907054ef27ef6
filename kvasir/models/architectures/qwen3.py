"""Qwen3: Llama with each query and key head normalised before it is rotated."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder, read_layer_windows

NAMES = {
    **llama.NAMES,
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def read_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    windows = read_layer_windows(config)
    return read_decoder(config, head_dim=128, qk_norm="head", qkv_bias=bias, o_bias=bias, windows=windows)


ARCHITECTURE = Architecture(read_spec, NAMES)
