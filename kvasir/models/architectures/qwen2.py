"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and windows on the upper layers if asked for."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder, read_layer_windows


def read_spec(config: Config) -> DecoderSpec:
    return read_decoder(config, qkv_bias=True, windows=read_layer_windows(config))


ARCHITECTURE = Architecture(read_spec, NAMES)
