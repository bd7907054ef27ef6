"""Gemma 1: Llama with scaled embeddings, gains that the checkpoint has less one, and a gate by GELU."""

from __future__ import annotations

from typing import Any

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config, flag, integer
from kvasir.models.spec import Architecture, DecoderSpec, read_activation, read_decoder


def read_gemma(config: Config, **options: Any) -> DecoderSpec:
    """What all Gemmas have in common."""
    bias = flag(config, "attention_bias")
    # "gelu" stands in the first files and means the approximation by tanh.
    activation = {"hidden_act": config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"}
    if activation["hidden_act"] == "gelu":
        activation["hidden_act"] = "gelu_pytorch_tanh"
    return read_decoder(
        config,
        head_dim=256,
        norm="rms+1",
        activation=read_activation(activation),
        qkv_bias=bias,
        o_bias=bias,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        **options,
    )


ARCHITECTURE = Architecture(read_gemma, NAMES)
