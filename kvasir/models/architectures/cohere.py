"""Cohere's Command-R: attention and feed-forward behind one LayerNorm without a bias, neighbours rotated against each
other, scaled logits."""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelError
from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, flag, real
from kvasir.models.spec import Architecture, DecoderSpec, read_decoder, same_ropes

NAMES = {name: ours for name, ours in llama.NAMES.items() if ours != "layers.*.mlp_norm"}


def read_cohere(config: Config, **options: Any) -> DecoderSpec:
    """What both generations have in common."""
    if flag(config, "use_qk_norm"):
        raise ModelError("config.json: use_qk_norm is not supported for this model; set model_impl='transformers'.")
    bias = flag(config, "attention_bias")
    return read_decoder(
        config,
        norm="layer, no bias",
        norm_eps=real(config, "layer_norm_eps", 1e-5),
        parallel=True,
        shared_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        logit_scale=real(config, "logit_scale", 0.0625),
        **options,
    )


def read_spec(config: Config) -> DecoderSpec:
    return read_cohere(config, ropes=same_ropes(config, theta=500000.0, interleaved=True))


ARCHITECTURE = Architecture(read_spec, NAMES)
