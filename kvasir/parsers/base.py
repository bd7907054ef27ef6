"""Parts of an answer, and the interface of a parser that makes them from a model's text. API process; knows no HTTP.

A new kind of part is a class here, in OutputPart, and a branch in each writer of kvasir/server.
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


@dataclass(slots=True)
class Reasoning:
    """Text that the model wrote for itself before the answer."""

    text: str


@dataclass(slots=True)
class ToolCall:
    """A call begins. Its arguments follow as ToolArguments of the same index."""

    index: int  # among the calls of this completion
    id: str
    name: str


@dataclass(slots=True)
class ToolArguments:
    """A piece of a call's arguments: JSON text, or the input's text of a custom tool."""

    index: int
    text: str


OutputPart: TypeAlias = Content | Reasoning | ToolCall | ToolArguments


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


class PartReader:
    """Reads the completions of one request as parts. Each has its own parser, which is fed the text as it comes."""

    def __init__(self, make: Callable[[], OutputParser] = PlainTextParser) -> None:
        self._make = make
        self._parsers: dict[int, OutputParser] = {}

    def read(self, choice: int, completion: CompletionOutput) -> Sequence[OutputPart]:
        """Parts of what is new in a completion, which is the `choice`-th of the reply."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._make()
        parts = parser.feed(completion.text)
        return parts if completion.finish_reason is None else joined([*parts, *parser.finish()])


class ReasoningReader(PartReader):
    """Also counts the tokens of reasoning, up to the one that ends it (`closing`)."""

    def __init__(self, make: Callable[[], OutputParser], closing: int) -> None:
        super().__init__(make)
        self._closing = closing
        self._counts: dict[int, int] = {}  # by choice
        self._seen: set[int] = set()  # choices that have reasoning
        self._done: set[int] = set()  # choices whose reasoning has ended

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(self._counts.values())

    def read(self, choice: int, completion: CompletionOutput) -> Sequence[OutputPart]:
        parts = super().read(choice, completion)
        if choice not in self._done:
            self._count(choice, completion.token_ids, parts)
        return parts

    def _count(self, choice: int, tokens: Sequence[int], parts: Sequence[OutputPart]) -> None:
        if any(isinstance(part, Reasoning) for part in parts):
            self._seen.add(choice)
        known = self._counts.get(choice, 0)
        if self._closing in tokens:
            self._counts[choice] = known + list(tokens).index(self._closing) + 1
            self._done.add(choice)
        elif any(not isinstance(part, Reasoning) for part in parts):
            self._counts[choice] = known if choice in self._seen else 0
            self._done.add(choice)
        else:
            self._counts[choice] = known + len(tokens)


def content_of(parts: Iterable[OutputPart]) -> str:
    """The text of all content among these parts."""
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Iterable[OutputPart]) -> str:
    """The text of all reasoning among these parts."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


@dataclass(slots=True)
class WholeCall:
    """A call with all of its arguments."""

    id: str
    name: str
    arguments: str


def calls_of(parts: Iterable[OutputPart]) -> list[WholeCall]:
    """The calls among the parts of a whole answer."""
    found: dict[int, WholeCall] = {}
    for part in parts:
        if isinstance(part, ToolCall):
            found[part.index] = WholeCall(part.id, part.name, "")
        elif isinstance(part, ToolArguments):
            found[part.index].arguments += part.text
    return list(found.values())


def joined(parts: Iterable[OutputPart]) -> list[OutputPart]:
    """The same parts with neighbours of one kind as one."""
    made: list[OutputPart] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, ToolCall) or type(last) is not type(part):
            made.append(part)
        elif isinstance(part, ToolArguments) and isinstance(last, ToolArguments):
            if last.index == part.index:
                made[-1] = ToolArguments(part.index, last.text + part.text)
            else:
                made.append(part)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            made[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Content) and isinstance(last, Content):
            made[-1] = Content(last.text + part.text)
    return made
