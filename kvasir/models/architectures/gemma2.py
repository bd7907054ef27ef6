"""Gemma 2: norms before and after each part, a window on every other layer, soft caps on scores and logits."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.architectures.gemma import read_gemma
from kvasir.models.config_reader import Config, integer, optional_real, real
from kvasir.models.spec import Architecture, DecoderSpec, windows_by_type

NAMES = {
    **llama.NAMES,
    "model.layers.*.post_attention_layernorm": "layers.*.attention_post_norm",
    "model.layers.*.pre_feedforward_layernorm": "layers.*.mlp_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_post_norm",
}


def read_spec(config: Config) -> DecoderSpec:
    capped = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}  # a null means none
    return read_gemma(
        config,
        norm_place="around",
        windows=windows_by_type(config, integer(config, "sliding_window", 4096), pattern=2),
        attention_scale=real(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=optional_real(capped, "attn_logit_softcapping"),
        logit_softcap=optional_real(capped, "final_logit_softcapping"),
    )


ARCHITECTURE = Architecture(read_spec, NAMES)
