"""Parsers turn the text that a model writes into parts: content now, reasoning and tool calls as further kinds.

API process. Every completion of a request has its own parser, which is fed the text as it comes. A parser is a module
beside this one that imports kvasir.parsers.base, and a line in PARSERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvasir.outputs import CompletionOutput
from kvasir.parsers.base import OutputParser, OutputPart, PlainTextParser

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
