"""Single values of a config.json, checked. A null counts as absent. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelError

Config = Mapping[str, Any]  # config.json


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of at least `least`. Without a default the file must have it."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"config.json: {key} must be a whole number of at least {least}, but is {value!r}.")
    return value


def real(config: Config, key: str, default: float | None = None) -> float:
    """A positive number. Without a default the file must have it."""
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} must be a positive number, but is {value!r}.")
    return float(value)


def optional_real(config: Config, key: str) -> float | None:
    """A positive number, or None where the file has none."""
    return None if config.get(key) is None else real(config, key)


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, but is {value!r}.")
    return value


def renamed(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """The same entries, those of `names` under the other name as well."""
    return {**config, **{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}}


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}, which this model needs.")
    return value
