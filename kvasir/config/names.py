"""Suggestions for misspelt names of settings and fields. Any process."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_NAME = 100


def did_you_mean(name: object, possible: Iterable[object]) -> str:
    """A sentence with the most similar names, or an empty string."""
    if len(str(name)) > _LONGEST_NAME:  # comparing takes time with the square of the length
        return ""
    near = difflib.get_close_matches(str(name), [str(p) for p in possible], n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
