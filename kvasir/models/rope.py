"""Rotary embedding as config.json describes it, in transformers' old and new spellings. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvasir.errors import ModelError
from kvasir.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)
from kvasir.models.config_reader import Config, flag, integer, mapping, optional_real, real


def read_rope(
    config: Config, head_dim: int, *, theta: float = 10000.0, share: float = 1.0, interleaved: bool = False
) -> RopeSpec:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as it was before. `theta` and
    `share` (of a head's dimensions that are rotated) are what the architecture takes where the file is silent."""
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("config.json: rotary embeddings that differ by layer type are not supported for this model.")
    theta = real(given, "rope_theta", real(config, "rope_theta", theta))
    share = real(given, "partial_rotary_factor", real(config, "partial_rotary_factor", share))
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ModelError(
            f"config.json: rotary embeddings turn pairs of numbers, and {rotary_dim} of a head's {head_dim} "
            f"(partial_rotary_factor {share:g}) cannot be so."
        )
    scaling = _read_scaling(given, config)
    if isinstance(scaling, LongRopeScaling):
        _check_count(scaling, rotary_dim // 2)
    return RopeSpec(rotary_dim, theta, scaling, interleaved)


def _check_count(scaling: LongRopeScaling, pairs: int) -> None:
    for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(factors) != pairs:
            raise ModelError(
                f"config.json: {name} has {len(factors)} factors, but {pairs} pairs of dimensions are turned."
            )


def _read_scaling(given: Config, config: Config) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(["default", *_READERS])
        raise ModelError(f"config.json: RoPE scaling {kind!r:.80} is not supported; supported are {known}.")
    return _READERS[kind](given, config)


def _trained_length(given: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    lengths = [integer(entries, key, least=2) for entries in (config, given) if entries.get(key) is not None]
    return lengths[0] if lengths else integer(config, "max_position_embeddings", least=2)


def _factor(given: Config, config: Config, trained: int) -> float:
    return optional_real(given, "factor") or integer(config, "max_position_embeddings") / trained


def _llama3(given: Config, config: Config) -> Llama3Scaling:
    return Llama3Scaling(
        factor=real(given, "factor"),
        low_freq_factor=real(given, "low_freq_factor"),
        high_freq_factor=real(given, "high_freq_factor"),
        original_max_positions=_trained_length(given, config),
    )


def _yarn(given: Config, config: Config) -> YarnScaling:
    trained = _trained_length(given, config)
    factor = _factor(given, config, trained)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = optional_real(given, "attention_factor")
    if attention is None and given.get("mscale") and given.get("mscale_all_dim"):
        attention = growth(real(given, "mscale")) / growth(real(given, "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_positions=trained,
        attention_factor=growth(1.0) if attention is None else attention,
        beta_fast=real(given, "beta_fast", 32.0),
        beta_slow=real(given, "beta_slow", 1.0),
        truncate=flag(given, "truncate", True),
    )


def _longrope(given: Config, config: Config) -> LongRopeScaling:
    trained = _trained_length(given, config)
    factor = _factor(given, config, trained)
    attention = optional_real(given, "attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongRopeScaling(_list(given, "short_factor"), _list(given, "long_factor"), trained, attention)


def _list(given: Config, key: str) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, list) or not values:
        raise ModelError(f"config.json: {key} must be a list of numbers, but is {values!r}.")
    return tuple(real({key: value}, key) for value in values)


_READERS: dict[str, Callable[[Config, Config], Any]] = {
    "linear": lambda given, config: LinearScaling(real(given, "factor")),
    "dynamic": lambda given, config: DynamicScaling(real(given, "factor"), integer(config, "max_position_embeddings")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi-3 files
}
