"""Parts of an answer, and the interface of a parser that makes them from a model's text. API process; knows no HTTP.

A new kind of part is a class here, in OutputPart, and a branch in each writer of kvasir/server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(slots=True)
class Content:
    """Text of the answer."""

    text: str


OutputPart: TypeAlias = Content


class OutputParser(Protocol):
    """Reads one completion."""

    def feed(self, text: str) -> Sequence[OutputPart]:
        """Parts of the new text. Text that may turn out to be of another kind is held back."""

    def finish(self) -> Sequence[OutputPart]:
        """Parts of the text that was held back; the completion has ended."""


class PlainTextParser:
    """All text is content."""

    def feed(self, text: str) -> Sequence[OutputPart]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[OutputPart]:
        return ()


def content_of(parts: Iterable[OutputPart]) -> str:
    """The text of all content among these parts."""
    return "".join(part.text for part in parts if isinstance(part, Content))
