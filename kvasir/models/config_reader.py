"""Reads and checks single values of a config.json. A null counts as absent. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelError

Config = Mapping[str, Any]  # config.json

# Larger values mean a damaged file, and building such a model would take all memory.
_MOST = {"num_hidden_layers": 4096, "max_position_embeddings": 1 << 27, "sliding_window": 1 << 31}
_MOST_OF_OTHERS = 1 << 24
_RANGES = {"factor": (1 / 64, 4096.0)}  # of RoPE scaling, which multiplies lengths
_RANGE_OF_OTHERS = (1e-30, 1e30)  # products and quotients with these fit into a float32


def fault_of_integer(key: str, value: object, least: int = 1) -> str | None:
    """What is wrong with the value of the entry `key`, in words that follow its name; None: nothing."""
    most = _MOST.get(key, _MOST_OF_OTHERS)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        return f"must be a whole number of at least {least}, but is {_shown(value)}"
    return f"must be at most {most}, but is {_shown(value)}" if value > most else None


def fault_of_real(key: str, value: object) -> str | None:
    """What is wrong with a value that must be a positive number; see fault_of_integer."""
    least, most = _RANGES.get(key, _RANGE_OF_OTHERS)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:  # false for NaN
        return None
    wanted = f"number from {least:g} to {most:g}" if key in _RANGES else "positive number"
    return f"must be a {wanted}, but is {_shown(value)}"


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of at least `least`. Without a default the entry is required."""
    value = _value(config, key, default)
    if fault := fault_of_integer(key, value, least):
        raise ModelError(f"config.json: {key} {fault}.")
    assert isinstance(value, int)
    return value


def real(config: Config, key: str, default: float | None = None) -> float:
    """A positive number. Without a default the entry is required."""
    value = _value(config, key, default)
    if fault := fault_of_real(key, value):
        raise ModelError(f"config.json: {key} {fault}.")
    return float(value)


_INTEGERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings"),
)


def check_numbers(config: Config) -> None:
    """Raise if one of the entries that nearly all models have is impossible. Settings are computed from them before an
    architecture reads them."""
    for key in _INTEGERS:
        if config.get(key) is not None:
            integer(config, key)
    for key in ("rope_parameters", "rope_scaling"):
        optional_real(mapping(config, key), "factor")
        if mapping(config, key).get("original_max_position_embeddings") is not None:
            integer(mapping(config, key), "original_max_position_embeddings")
    optional_real(config, "rms_norm_eps")


def listed(config: Config, key: str, kind: type) -> list[Any] | None:
    """A list of values of one type; None if the file has none."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)):
        raise ModelError(f"config.json: {key} must be a list of {kind.__name__}, but is {_shown(value)}.")
    return None if value is None else list(value)


def mapping(config: Config, key: str) -> Config:
    """A mapping; empty if the file has none."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} must be a mapping, but is {_shown(value)}.")
    return value


def optional_real(config: Config, key: str) -> float | None:
    """A positive number; None if the file has none."""
    return None if config.get(key) is None else real(config, key)


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, but is {_shown(value)}.")
    return value


def renamed(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """The entries, with those in `names` under their second name as well."""
    return {**config, **{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}}


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}, which this model needs.")
    return value


def _shown(value: object) -> str:
    """A value in one line of an error message; a damaged file may hold anything."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:76]} ..."
