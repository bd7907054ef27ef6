"""JSON as the standard has it: no NaN, no bad UTF-8, no nesting that exhausts the stack."""

from __future__ import annotations

from typing import Any

import msgspec

ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError)  # of whatever is no JSON


def decode(data: bytes | str, what: str) -> Any:
    """A ValueError with one sentence for whatever is wrong. `what`: the body, or the message."""
    try:
        return msgspec.json.decode(data)
    except ERRORS as error:
        raise ValueError(f"{what} is not valid JSON: {reason(error)}.") from error


def reason(error: Exception) -> str:
    """What is wrong, without a codec's own words."""
    if isinstance(error, UnicodeError) or "utf-8" in str(error).lower():
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
