"""Parsers turn the text that a model writes into parts: content now, reasoning and tool calls as further kinds.

API process. Every completion of a request has its own parser, which is fed the text as it comes. Parsers are registered
in PARSERS alone. A new kind of part is a class here and a branch in each writer of kvasir/server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvasir.outputs import CompletionOutput


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


PLAIN_TEXT = "plain_text"
PARSERS: dict[str, Callable[[], OutputParser]] = {PLAIN_TEXT: PlainTextParser}


class PartReader:
    """Reads the completions of one request as parts. `parser` is a name in PARSERS."""

    def __init__(self, parser: str = PLAIN_TEXT) -> None:
        self._make = PARSERS[parser]
        self._parsers: dict[int, OutputParser] = {}

    def read(self, choice: int, completion: CompletionOutput) -> Sequence[OutputPart]:
        """Parts of what is new in a completion, which is the `choice`-th of the reply."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._make()
        parts = parser.feed(completion.text)
        return parts if completion.finish_reason is None else (*parts, *parser.finish())


def content_of(parts: Iterable[OutputPart]) -> str:
    """The text of all content among these parts."""
    return "".join(part.text for part in parts if isinstance(part, Content))
