"""IBM's Granite."""

from __future__ import annotations

from kvasir.models.architectures.llama import NAMES
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_attention, read_decoder, read_gated_mlp, read_rms_norm


def read_spec(config: Config) -> DecoderSpec:
    """Granite: Llama with multipliers on embeddings, scores, residuals and logits."""
    bias, norm = flag(config, "attention_bias"), read_rms_norm(config)
    scale = real(config, "attention_multiplier", 1.0)
    attention = read_attention(config, scale=scale, qkv_bias=bias, o_bias=bias)
    mlp = read_gated_mlp(config, bias=flag(config, "mlp_bias"))
    return read_decoder(
        config,
        pre_norm(norm, attention, mlp, residual_scale=real(config, "residual_multiplier", 1.0)),
        norm,
        embedding_scale=real(config, "embedding_multiplier", 1.0),
        logit_scale=1.0 / real(config, "logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
