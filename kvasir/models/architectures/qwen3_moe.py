"""Qwen3-MoE: Qwen3 with experts on most layers."""

from __future__ import annotations

from dataclasses import replace

from kvasir.models.architectures import qwen3
from kvasir.models.architectures.qwen2_moe import ROUTED, read_moe
from kvasir.models.config_reader import Config
from kvasir.models.spec import Architecture, DecoderSpec, head_dim_of

NAMES = {**qwen3.NAMES, **ROUTED}


def read_spec(config: Config) -> DecoderSpec:
    config = {**config, "head_dim": head_dim_of(config)}  # where the file is silent it is not Qwen3's 128
    return replace(qwen3.read_spec(config), moe=read_moe(config, top_k=8, shared_size=None))


ARCHITECTURE = Architecture(read_spec, NAMES)
