"""Gemma 3, its text model: Gemma 2 with normalised heads instead of soft caps, five layers with a window to one
without, and a rotation of its own for either kind."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.layers.rope import RopeSpec
from kvasir.models.architectures import gemma2
from kvasir.models.architectures.gemma import read_gemma
from kvasir.models.config_reader import Config, integer, mapping, optional_real, real
from kvasir.models.rope import read_rope
from kvasir.models.spec import Architecture, DecoderSpec, head_dim_of, windows_by_type

NAMES = {
    **gemma2.NAMES,
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def read_spec(config: Config) -> DecoderSpec:
    window, pattern = integer(config, "sliding_window", 4096), integer(config, "sliding_window_pattern", 6)
    windows = windows_by_type(config, window, pattern)
    near, far = _ropes(config)
    return read_gemma(
        config,
        norm_place="around",
        qk_norm="head",
        windows=windows,
        ropes=tuple(far if window is None else near for window in windows),
        attention_scale=real(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=optional_real(config, "attn_logit_softcapping"),
        logit_softcap=optional_real(config, "final_logit_softcapping"),
    )


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Of layers with a window, and of those without; one entry for each in new files, two thetas in old ones."""
    given = mapping(config, "rope_parameters")
    head_dim = head_dim_of(config, 256)
    if any(isinstance(value, Mapping) for value in given.values()):
        near = {**config, "rope_parameters": given.get("sliding_attention")}
        far = {**config, "rope_parameters": given.get("full_attention")}
        return read_rope(near, head_dim), read_rope(far, head_dim, theta=1e6)
    near_theta = real(config, "rope_local_base_freq", 10000.0)
    return RopeSpec(head_dim, near_theta), read_rope(config, head_dim, theta=1e6)


ARCHITECTURE = Architecture(read_spec, NAMES)
