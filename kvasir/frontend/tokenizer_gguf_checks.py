"""Whether a GGUF file's tokenizer entries are what they should be, entry by entry. API process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvasir.errors import ModelError
from kvasir.gguf_file import GGUFFile

_PREFIX = "tokenizer.ggml."
_LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
_ONES = {
    "tokenizer.chat_template": str,
    **{_PREFIX + name: str for name in ("model", "pre")},
    **{_PREFIX + name: bool for name in ("add_bos_token", "add_eos_token", "add_space_prefix")},
}
_IDS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
_NAMES = {str: "text", float: "number", int: "whole number", bool: "yes or no"}
_LONGEST = 1 << 14  # a token's characters; cutting a longer one in every way would take forever


def check_entries(file: GGUFFile) -> None:
    """Raise unless every entry is of its kind and all text is UTF-8."""
    for fault in _faults(file.metadata):
        raise ModelError(f"{file.path} is damaged: {fault}; download it again.")


def _faults(metadata: dict[str, Any]) -> Iterator[str]:
    for name, kind in _LISTS.items():
        values = metadata.get(_PREFIX + name)
        if values is None:
            continue
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            yield f"{_PREFIX}{name} is no list of {_NAMES[kind]}s"
        elif kind is str:
            yield from _text_faults(_PREFIX + name, values)
    for name, kind in _ONES.items():
        value = metadata.get(name)
        if value is not None and type(value) is not kind:
            yield f"{name} is no {_NAMES[kind]}"
        elif isinstance(value, str) and not _is_utf8(value):
            yield f"{name} is not UTF-8"
    for name in _IDS:
        value = metadata.get(_PREFIX + name)
        if value is not None and (type(value) is not int or value < 0):
            yield f"{_PREFIX}{name} is not the number of a token"


def _text_faults(name: str, values: list[str]) -> Iterator[str]:
    """Text that is not UTF-8 was read with stand-ins for its bytes."""
    for number, value in enumerate(values):
        if len(value) > _LONGEST:
            yield f"entry {number} of {name} has {len(value)} characters"
        if not value.isascii() and not _is_utf8(value):
            yield f"entry {number} of {name} is not UTF-8"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
