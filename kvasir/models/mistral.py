"""Mistral: Llama, with a sliding window on every layer in the first versions."""

from __future__ import annotations

from kvasir.models.llama import NAMES
from kvasir.models.spec import Architecture, Config, DecoderSpec, integer, read_decoder


def read_spec(config: Config) -> DecoderSpec:
    # A null means no window; a file that does not speak of it means the first version's.
    window = None if config.get("sliding_window", 4096) is None else integer(config, "sliding_window", 4096)
    return read_decoder(config, windows=(window,) * integer(config, "num_hidden_layers"))


ARCHITECTURE = Architecture(read_spec, NAMES)
