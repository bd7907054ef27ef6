"""Reads text that arrives in pieces, as if it were all there. API process.

A reader's `_run` is a generator: it yields where it needs more text, so a grammar with many states reads as plain code.
Every character is looked at once, and only text that may be the beginning of a marker is held back.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

from kvasir.parsers.base import Content, OutputPart, Reasoning, ToolArguments, ToolCall

Steps = Generator[None, None, None]
Emit = Callable[[str], object]
MAX_NAME = 256  # characters of a name or key; more are no call
SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
_OUTSIDE = re.compile(r'[^"{}\[\],: \t\r\n]*')
_IN_BRACKETS = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*')


class MalformedError(Exception):
    """The text is not what the format says. What was read of it is content."""


class EndedError(MalformedError):
    """The text ended in the middle."""


class TextReader(ABC):
    """The pieces of text, and the parts found in them."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what is before it was read
        self._ended = False
        self._held: list[str] | None = None  # what was read since a beginning that may turn out to be content
        self._parts: list[OutputPart] = []
        self._steps = self._run()
        self._done = False

    def feed(self, text: str) -> Sequence[OutputPart]:
        if not text:
            return ()
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> Sequence[OutputPart]:
        self._ended = True
        return self._advance()

    def _advance(self) -> Sequence[OutputPart]:
        if not self._done:
            try:
                next(self._steps)
            except StopIteration:
                self._done = True
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _run(self) -> Steps:
        """Read the text; add to `_parts`."""

    # ------------------------------------------------------------ parts

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if type(last) is kind:
            last.text += text
        else:
            self._parts.append(kind(text))

    def _add_arguments(self, index: int, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolArguments) and last.index == index:
            last.text += text
        elif text:
            self._parts.append(ToolArguments(index, text))

    def _add_call(self, index: int, call_id: str, name: str) -> None:
        self._parts.append(ToolCall(index, call_id, name))

    # ------------------------------------------------------------ reading

    def _take(self, end: int) -> str:
        """Read up to a place in the text."""
        found = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(found)
        return found

    def _more(self) -> Steps:
        """Wait for more text."""
        if self._ended:
            raise EndedError
        yield

    def _peek(self) -> Generator[None, None, str]:
        """The next character."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _skip_spaces(self) -> Steps:
        """Read whitespace; the text may end in it."""
        while True:
            match = _SPACES.match(self._text, self._at)
            assert match is not None, "the pattern takes an empty text"
            self._take(match.end())
            if self._at < len(self._text) or self._ended:
                return
            yield

    def _try_word(self, word: str) -> Generator[None, None, bool]:
        """Read this text if it comes next; otherwise read nothing."""
        while True:
            if self._text.startswith(word, self._at):
                self._take(self._at + len(word))
                return True
            rest = len(self._text) - self._at
            if rest >= len(word) or self._ended or not word.startswith(self._text[self._at :]):
                return False
            yield

    def _try_marker(self, marker: str) -> Generator[None, None, bool]:
        """Read a marker, with any whitespace around and between its words. If only its first words come, the others
        are missing; they are not waited for."""
        words = marker_words(marker)
        for number, word in enumerate(words):
            yield from self._skip_spaces()
            if not (yield from self._try_word(word)):
                return number > 0
        return True

    def _expect(self, word: str) -> Steps:
        if not (yield from self._try_word(word)):
            raise EndedError if self._ended and self._at == len(self._text) else MalformedError

    def _expect_marker(self, marker: str) -> Steps:
        for word in marker_words(marker):
            yield from self._skip_spaces()
            yield from self._expect(word)

    def _until(self, find: Finder, emit: Emit) -> Generator[None, None, str]:
        """Read up to one of several words and read it, too; the text before it goes to `emit` as it comes. Returns the
        word. EndedError: none came, and all text was emitted."""
        while True:
            match = find.search(self._text, self._at)
            if match is not None:
                if match.start() > self._at:
                    emit(self._take(match.start()))
                return self._take(match.end())
            keep = 0 if self._ended else find.begun(self._text, self._at)
            if len(self._text) - keep > self._at:
                emit(self._take(len(self._text) - keep))
            yield from self._more()

    def _short_until(self, *words: str) -> Generator[None, None, tuple[str, str]]:
        """A short text up to one of several words, which is read, too; both are returned."""
        find, found = finder(words), ""
        while True:
            match = find.search(self._text, self._at)
            end = match.start() if match is not None else len(self._text)
            if match is None and not self._ended:
                end -= find.begun(self._text, self._at)
            found += self._take_short(end, len(found))
            if match is not None:
                return found, self._take(match.end())
            yield from self._more()

    def _short_match(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """A short text of a pattern that takes each character by itself."""
        found = ""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "the pattern takes an empty text"
            found += self._take_short(match.end(), len(found))
            if self._at < len(self._text) or self._ended:
                return found
            yield

    def _take_short(self, end: int, size: int) -> str:
        """Read up to a place, if a text of which `size` characters are read stays short."""
        if end - self._at > MAX_NAME - size:
            self._take(self._at + MAX_NAME - size)  # always as far, wherever the text is cut
            raise MalformedError
        return self._take(end)

    # ------------------------------------------------------------ JSON

    def _copy_json(self, emit: Emit) -> Steps:
        """Read one JSON value by the depth of its brackets, and emit its text."""
        depth, quoted, escaped, begun = 0, False, False, False
        while True:
            if self._at == len(self._text):
                yield from self._more()
            text, at = self._text, self._at
            ended = False
            while at < len(text) and not ended:
                if escaped:
                    at, escaped = at + 1, False
                    continue
                match = (_IN_STRING if quoted else _IN_BRACKETS if depth else _OUTSIDE).match(text, at)
                assert match is not None, "the patterns take an empty text"
                begun |= match.end() > at
                at = match.end()
                if at == len(text):
                    break
                mark = text[at]
                if quoted:
                    quoted, escaped = mark != '"', mark == "\\"
                    ended = not quoted and depth == 0
                elif depth == 0 and (begun or mark not in '"{['):  # the end of a number or word
                    ended = True
                    break
                elif mark == '"':
                    quoted = True
                elif mark in "{[":
                    depth += 1
                else:
                    depth -= 1
                    ended = depth == 0
                at += 1
                begun = True
            if at > self._at:
                emit(self._take(at))
            if ended:
                return

    def _json_string(self, emit: Emit, short: bool = False) -> Steps:
        """Read the rest of a JSON string, after its first quote; emit its characters."""
        pending = ""  # an escape that is not complete
        size = 0
        while True:
            character = yield from self._peek()
            if pending:
                pending += self._take(self._at + 1)
                if len(pending) == 2 and pending[1] != "u":
                    emit(_ESCAPES.get(pending[1], pending))
                    pending = ""
                elif len(pending) == 6 or len(pending) == 12:
                    code = pending[-4:]
                    if not all(digit in "0123456789abcdefABCDEF" for digit in code):
                        raise MalformedError
                    if len(pending) == 6 and 0xD800 <= int(code, 16) < 0xDC00:
                        continue  # the second half follows
                    emit(_decoded(pending))
                    pending = ""
                elif (len(pending) == 7 and pending[6] != "\\") or (len(pending) == 8 and pending[7] != "u"):
                    raise MalformedError
                continue
            if character == '"':
                self._take(self._at + 1)
                return
            if character == "\\":
                pending = self._take(self._at + 1)
                continue
            match = _IN_STRING.match(self._text, self._at)
            assert match is not None, "the pattern takes an empty text"
            before = self._at
            emit(self._take_short(match.end(), size) if short else self._take(match.end()))
            size += self._at - before

    def _short_json_string(self) -> Generator[None, None, str]:
        """A short JSON string with its quotes."""
        found: list[str] = []
        yield from self._expect('"')
        yield from self._json_string(found.append, short=True)
        return "".join(found)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", '"': '"', "\\": "\\"}


def _decoded(escape: str) -> str:
    found: str = json.loads(f'"{escape}"')
    return found if not any("\ud800" <= c <= "\udfff" for c in found) else "\ufffd"


def quoted(text: str) -> str:
    """A text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@lru_cache(maxsize=512)
def marker_words(marker: str) -> tuple[str, ...]:
    """The words of a marker. A marker that is only whitespace is a line break."""
    return tuple(marker.split()) or (("\n",) if marker else ())


class Finder:
    """Finds the first of several words in a text, or the beginning of one at its end."""

    def __init__(self, words: tuple[str, ...]) -> None:
        longest_first = sorted(words, key=len, reverse=True)
        self.search = re.compile("|".join(map(re.escape, longest_first))).search
        self._words = longest_first
        self._longest = max(map(len, words)) - 1
        self._first = re.compile("[" + re.escape("".join({word[0] for word in words})) + "]")

    def begun(self, text: str, at: int) -> int:
        """Number of characters at the end of a text, from `at` on, that may be the beginning of a word."""
        start = max(at, len(text) - self._longest)
        while (match := self._first.search(text, start)) is not None:
            start = match.start()
            end = text[start:]
            if any(word.startswith(end) for word in self._words):
                return len(end)
            start += 1
        return 0


@lru_cache(maxsize=512)
def finder(words: tuple[str, ...]) -> Finder:
    return Finder(words)
