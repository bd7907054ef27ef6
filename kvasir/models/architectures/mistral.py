"""Mistral: Llama, with a sliding window on every layer in the first versions."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config
from kvasir.models.spec import Architecture, DecoderSpec, one_window, read_decoder


def read_spec(config: Config) -> DecoderSpec:
    return read_decoder(config, windows=one_window(config, 4096))


ARCHITECTURE = Architecture(read_spec, NAMES)
