"""JSON as the standard has it: no NaN, no bad UTF-8, no nesting that exhausts the stack."""

from __future__ import annotations

from typing import Any

import msgspec


def decode(data: bytes | str, what: str) -> Any:
    """A ValueError with one sentence for whatever is wrong. `what`: the body, or the message."""
    try:
        return msgspec.json.decode(data)
    except UnicodeError:
        reason = "it is not UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except msgspec.DecodeError as error:
        reason = "it is not UTF-8" if "utf-8" in str(error).lower() else str(error)
    raise ValueError(f"{what} is not valid JSON: {reason}.")
