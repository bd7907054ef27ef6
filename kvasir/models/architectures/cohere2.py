"""Cohere's Command-R7B and A: Command-R with a window on most layers; those without one do not rotate."""

from __future__ import annotations

from kvasir.models.architectures.cohere import NAMES, read_cohere
from kvasir.models.config_reader import Config, integer
from kvasir.models.rope import read_rope
from kvasir.models.spec import Architecture, DecoderSpec, head_dim_of, windows_by_type


def read_spec(config: Config) -> DecoderSpec:
    window, pattern = integer(config, "sliding_window", 4096), integer(config, "sliding_window_pattern", 4)
    windows = windows_by_type(config, window, pattern)
    rope = read_rope(config, head_dim_of(config), interleaved=True)
    return read_cohere(config, windows=windows, ropes=tuple(None if window is None else rope for window in windows))


ARCHITECTURE = Architecture(read_spec, NAMES)
