"""API keys: who may send requests, the name in the log, the share of the engine, the limits (limits.py keeps to them).

Keys are kept as digests and compared in constant time; a key file may hold digests instead of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.config import env
from kvasir.config.args import read_config_file
from kvasir.errors import ConfigError, did_you_mean
from kvasir.frontend.requests.input import WEIGHTS
from kvasir.log import get_logger
from kvasir.server.config import ServerConfig

logger = get_logger(__name__)

_FIELDS = ("name", "key", "sha256", "weight", "requests_per_minute", "tokens_per_minute", "max_concurrent")
_NUMBERS = ("weight", "requests_per_minute", "tokens_per_minute", "max_concurrent")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key. A limit of None does not apply."""

    name: str
    digest: bytes = b""
    weight: float = 1.0  # its share beside other keys, under --scheduling-policy fair or wrr
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: float | None = None


ANYBODY = ApiKey("")


class KeyRing:
    """The valid keys; without any, no key is needed."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = list(keys)
        self.is_open = not keys

    def find(self, presented: str | None) -> ApiKey | None:
        """The key that a client presents, or None. A wrong key takes as long as a right one."""
        if self.is_open:
            return ANYBODY
        if not presented:
            return None
        digest = _digest(presented)
        found = None
        for key in self.keys:  # compares all of them, for constant time
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def load_keys(config: ServerConfig) -> KeyRing:
    """The keys of --api-key (or KVASIR_API_KEY) and of the key file."""
    given = config.api_key or _words(env.API_KEY.read_text())
    if not all(given):
        raise ConfigError("--api-key is empty, so everyone could use the server: set a key, or leave it out.")
    keys = [ApiKey(f"key-{i}", _digest(word)) for i, word in enumerate(given, start=1)]
    if config.api_key_file is not None:
        keys += _read_file(config.api_key_file)
    _no_duplicates("name", [key.name for key in keys])
    _no_duplicates("key", [key.digest for key in keys])
    return KeyRing(keys)


def _words(text: str) -> list[str]:
    """The keys in an environment variable, separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text and not words:
        raise ConfigError(f"{env.API_KEY.name} is set, but has no key in it: set one, or unset it.")
    return words


def _read_file(path: str) -> Iterable[ApiKey]:
    entries = read_config_file(path, "key file").get("keys")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must have `keys:`, a list of entries with name and key.")
    if os.stat(path).st_mode & 0o004 and any("key" in entry for entry in entries if isinstance(entry, dict)):
        logger.warning("every user of this machine can read the keys in %s: chmod o-r it, or write sha256", path)
    return [_read_key(f"{path}, entry {i}", entry) for i, entry in enumerate(entries, start=1)]


def _read_key(where: str, entry: object) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: an entry is a mapping with name and key.")
    for name in entry.keys() - set(_FIELDS):
        raise ConfigError(f"{where}: {name} is not known.{did_you_mean(name, _FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: a key needs a name, which the log shows.")
    numbers = {field: _number(f"{where} ({name})", field, entry[field]) for field in _NUMBERS if field in entry}
    return ApiKey(name, _key_digest(f"{where} ({name})", entry), **numbers)


def _key_digest(where: str, entry: Mapping[Any, Any]) -> bytes:
    key, sha256 = entry.get("key"), entry.get("sha256")
    if isinstance(key, str) and key and sha256 is None:
        return _digest(key)
    if key is None and isinstance(sha256, str) and re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        return bytes.fromhex(sha256)
    raise ConfigError(f"{where}: give key, a text, or sha256, its digest in 64 hexadecimal digits: one of them.")


def _number(where: str, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{where}: {field} must be a number above 0, not {value!r}.")
    least, most = WEIGHTS
    if field == "weight" and not least <= value <= most:
        raise ConfigError(f"{where}: weight must be from {least:g} to {most:g}, not {value!r}.")
    return float(value)


def _no_duplicates(what: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(f"Two API keys have the same {what}.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
