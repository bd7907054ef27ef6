"""All error classes of Kvasir. Any process.

KvasirError
├── ConfigError      the engine cannot be built: a setting, a file or the machine is wrong
│   └── ModelError   the model's files are missing, corrupt or not supported
├── RequestError     one request is wrong; the engine continues (HTTP 4xx)
│   ├── PromptTooLongError   the prompt leaves no room in the model's context
│   └── OverloadedError   the request is valid, but the queue is full (HTTP 429)
└── EngineError      the engine failed (HTTP 5xx)
    ├── DeviceMemoryError   a step did not fit into device memory
    └── EngineDeadError   the engine failed earlier and accepts no more requests

A message says what was asked, what is possible and what to change.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_ECHO = 200  # characters of a client's input that an error repeats
_LONGEST_NAME = 100
_SHORTEST_NAME = 2  # letters of a name that is worth suggesting
_ALIKE = 0.75  # of two names as a whole


def excerpt(text: str) -> str:
    """The beginning of a text that repeats a client's input, such as another library's error."""
    return text if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]}..."


class KvasirError(Exception):
    """Base class of all errors that Kvasir raises on purpose."""

    request_id: str | None = None  # of the wrong request, if the error is raised after it was added


class ConfigError(KvasirError, ValueError):
    """The engine cannot be built with these settings."""


class ModelError(ConfigError):
    """A model's files are missing, corrupt or not supported."""


class RequestError(KvasirError, ValueError):
    """One request is wrong. `parameter` is the name of the wrong field, if there is one."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer. `num_tokens`: its length, unless it was too long to be tokenized."""

    def __init__(self, message: str, parameter: str | None = None, num_tokens: int | None = None) -> None:
        super().__init__(message, parameter)
        self.num_tokens = num_tokens


class OverloadedError(RequestError):
    """The queue is full. `retry_after` is the number of seconds to wait before trying again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(KvasirError, RuntimeError):
    """The engine failed while running."""


class DeviceMemoryError(EngineError):
    """A step did not fit into device memory. Its results are undefined."""


class EngineDeadError(EngineError):
    """The engine failed earlier and accepts no more requests."""


def did_you_mean(name: object, possible: Iterable[object], by_words: bool = False) -> str:
    """A sentence with the most similar names, or an empty string. `by_words` is for names of several words, such as
    settings and flags: these must be alike as a whole, or share half of their words."""
    if len(str(name)) > _LONGEST_NAME:  # comparing takes time with the square of the length
        return ""
    near = difflib.get_close_matches(str(name), [str(p) for p in possible], n=3, cutoff=0.6)
    if by_words:
        near = [each for each in near if _near_by_words(str(name), each)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _near_by_words(name: str, other: str) -> bool:
    words, others = (re.findall(r"[^-_]+", each) for each in (name, other))
    if len("".join(others)) < _SHORTEST_NAME or (other.startswith("-") and not other.startswith("--")):
        return False  # single letters and short flags are like anything
    alike = difflib.SequenceMatcher(None, "-".join(words), "-".join(others)).ratio() >= _ALIKE
    return alike or 2 * len(set(words) & set(others)) >= max(len(words), len(others))
