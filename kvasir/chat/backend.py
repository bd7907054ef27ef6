"""Who answers on the command line. Two do: a model in this process (local.py) and a server (remote.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, str]


@dataclass(slots=True, frozen=True)
class Usage:
    """What an answer took, in tokens."""

    prompt: int
    cached: int  # of the prompt
    output: int
    finish_reason: str | None = None


Piece = str | Usage  # text as it comes, and in the end what it took


class Backend(Protocol):
    name: str  # of the model

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        """The next message. Closing the iterator ends the request. A KvasirError says in a sentence what is wrong."""

    def complete(self, prompt: str, params: Mapping[str, Any]) -> Iterator[Piece]:
        """What follows a text; the same holds."""

    def describe(self) -> list[str]:
        """Lines for /stats."""

    def close(self) -> None: ...
