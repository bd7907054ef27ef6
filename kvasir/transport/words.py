"""What client and engine say to each other beside requests and outputs: rare, so pickled. API and core process.

Both processes belong to one user and meet in a directory that nobody else may enter.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvasir.config import EngineConfig
from kvasir.errors import EngineError, KvasirError

# First frame of a message, so that its kind is known before it is decoded.
ADD, ABORT, ASK = b"+", b"-", b"?"  # to the engine: an EngineRequest, [(key, tokens kept)], a Question
OUTPUT, REFUSED, ANSWER = b"=", b"!", b"."  # from it: an EngineOutput, a Refused, an Answer


@dataclass(slots=True)
class Start:
    """What an engine process is told when it starts."""

    asked: EngineConfig
    executor: (
        str | Callable[[EngineConfig], Any] | None
    )  # in place of the model's: "module:name", or something picklable
    directory: str
    index: int
    owner: int  # process id


@dataclass(slots=True)
class Question:
    number: int
    name: str  # a method of the core
    args: tuple[Any, ...]


@dataclass(slots=True)
class Answer:
    number: int
    value: Any
    error: KvasirError | None = None


@dataclass(slots=True)
class Refused:
    """The core did not take a request."""

    key: int
    error: KvasirError


def write(word: Question | Answer | Refused) -> bytes:
    return pickle.dumps(word, protocol=pickle.HIGHEST_PROTOCOL)


def read(data: bytes) -> Any:
    return pickle.loads(data)


def as_one_sentence(error: BaseException, what: str) -> KvasirError:
    """An error as another process is told, on one line: our own with their types, others with their names."""
    if isinstance(error, EngineError):
        return type(error)(" ".join(str(error).split()))
    if isinstance(error, KvasirError):
        return error
    return EngineError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}".rstrip(": "))
