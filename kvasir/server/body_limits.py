"""What a body may contain at most, counted before it is decoded; and the names of its fields that nobody knows.

Only bodies that are long or have such fields come here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from kvasir.log import get_logger

logger = get_logger(__name__)

# Decoding makes up to a hundred bytes of objects of one byte, so these are counted before.
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16  # lists and objects
MAX_STRINGS = 1 << 18  # names and texts
MAX_EMBEDDED_VALUES = 1 << 18  # of all JSON that stands in texts
_FEW_VALUES = 16  # a text of so few needs no counting
_BLOCK = 1 << 20  # bytes that are scanned at once


def exceeded_limit(data: bytes, max_values: int) -> str | None:
    """A sentence without its subject if the data, whether or not it is JSON, exceeds a limit."""
    return next((problem for counts in json_counts(data) if (problem := _exceeded(counts, max_values))), None)


def exceeded_by_texts(texts: Iterable[str]) -> str | None:
    """A sentence without its subject if texts that are decoded as JSON, such as the arguments of tool calls, together
    exceed a limit. They are one text each in the body, whatever they contain."""
    sums = JsonCounts(0, 0, 0, 0)
    for text in texts:
        if text.count("[") + text.count("{") + text.count(",") + text.count('"') < _FEW_VALUES:
            continue  # all texts of a body together are as few as its texts
        for counts in json_counts(text.encode(errors="replace")):
            if problem := _exceeded(JsonCounts(max(sums.depth, counts.depth), *map(add, sums[1:], counts[1:]))):
                return problem
        sums = JsonCounts(0, *map(add, sums[1:], counts[1:]))
    return None


class JsonCounts(NamedTuple):
    depth: int  # the greatest
    containers: int
    strings: int
    commas: int


def _exceeded(counts: JsonCounts, max_values: int = MAX_EMBEDDED_VALUES) -> str | None:
    if counts.depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep."
    for count, most, things in (
        (counts.containers, MAX_CONTAINERS, "lists and objects"),
        (counts.strings, MAX_STRINGS, "texts and names"),
        (counts.commas, max_values, "values"),
    ):
        if count > most:
            return f"has more than {most} {things}."
    return None


def json_counts(data: bytes) -> Iterator[JsonCounts]:
    """What the data has up to the end of each block."""
    if b"\\" in data:  # in strings alone, where they may hide a quote
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    level = depth = containers = quotes = commas = 0
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        is_quote = block == ord('"')
        outside = (np.cumsum(is_quote, dtype=np.int32) + quotes) % 2 == 0  # of strings
        opens = ((block == ord("[")) | (block == ord("{"))) & outside
        closes = ((block == ord("]")) | (block == ord("}"))) & outside
        levels = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32) + level
        level, depth = int(levels[-1]), max(depth, int(levels.max()))
        containers += int(np.count_nonzero(opens))
        quotes += int(np.count_nonzero(is_quote))
        commas += int(np.count_nonzero((block == ord(",")) & outside))
        yield JsonCounts(depth, containers, quotes // 2, commas)


# ---------------------------------------------------------------- unknown fields

_MAX_NAMES = 16  # that are shown
_MAX_NAME = 64  # characters
_NOT_SHOWN = re.compile(r"[^!-+\--~]")  # in a header whose items are separated by commas


def name_unknown_fields(names: Sequence[str], request_id: str, log: bool) -> tuple[str, ...]:
    """The names as a header can show them. With `log` they are also logged."""
    shown = tuple(_NOT_SHOWN.sub("?", name[:_MAX_NAME]) for name in names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        shown = (*shown, f"and {len(names) - _MAX_NAMES} more")
    if log:
        fields = {"request_id": request_id, "unknown_fields": shown}
        message = "%s has unknown fields, which are ignored: %s"
        logger.warning(message, request_id, ", ".join(shown), extra={"fields": fields})
    return shown
