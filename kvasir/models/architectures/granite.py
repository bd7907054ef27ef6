"""Granite: Llama with a multiplier on embeddings, scores, residuals and logits."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder


def read_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    return read_decoder(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        embedding_scale=real(config, "embedding_multiplier", 1.0),
        attention_scale=real(config, "attention_multiplier", 1.0),
        residual_scale=real(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / real(config, "logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
