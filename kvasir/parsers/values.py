"""Translates argument values that are not JSON to JSON, piece by piece: Python literals, Gemma's notation, text in
tags. API process."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from kvasir.parsers.formats import ToolFormat
from kvasir.parsers.reader import Emit, MalformedError, Steps, TextReader, finder, marker_words, quoted
from kvasir.parsers.schemas import kind_of

MAX_DEPTH = 64  # of lists and dicts in Python's or Gemma's notation
_WORD = re.compile(r"[^\s,()\[\]{}:='\"<]*")
_PY_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_PY_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_PY_ESCAPES |= {"\\": "\\", "'": "'", '"': '"'}
_PY_CODES = {"x": 2, "u": 4, "U": 8}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PARAMETER = re.compile(r"[^\W\d]\w*\Z")


class PythonValues(TextReader):
    """Calls in Python's notation: f(a=1, b="x")."""

    _start: Callable[..., Callable[[str], None]]
    _schemas: Mapping[str, Mapping[str, Any]]

    def _python_call(self) -> Steps:
        name, _ = yield from self._short_until("(")
        name = name.strip()
        if not name or not all(part.replace("-", "_").isidentifier() for part in name.split(".")):
            raise MalformedError
        emit = self._start(name)
        properties = self._schemas.get(name, {}).get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        emit("{")
        number = 0
        while True:
            yield from self._skip_spaces()
            if (yield from self._try_word(")")):
                break
            if number:
                yield from self._expect(",")
                yield from self._skip_spaces()
                if (yield from self._try_word(")")):  # a comma after the last
                    break
                emit(", ")
            yield from self._python_argument(emit, names[number] if number < len(names) else f"arg{number}")
            number += 1
        emit("}")

    def _python_argument(self, emit: Emit, position_name: str) -> Steps:
        """key=value, or a value alone, which gets the name of its position."""
        character = yield from self._peek()
        if not (character.isalpha() or character == "_"):
            emit(json.dumps(position_name, ensure_ascii=False) + ": ")
            yield from self._python_value(emit, 0)
            return
        word = yield from self._short_match(_WORD)
        yield from self._skip_spaces()
        if (yield from self._try_word("=")):
            if not _PARAMETER.match(word):
                raise MalformedError
            emit(json.dumps(word, ensure_ascii=False) + ": ")
            yield from self._python_value(emit, 0)
        else:
            emit(json.dumps(position_name, ensure_ascii=False) + ": " + _constant(word))

    def _python_value(self, emit: Emit, depth: int) -> Steps:
        yield from self._skip_spaces()
        character = yield from self._peek()
        if depth > MAX_DEPTH:
            raise MalformedError
        if character in "'\"":
            yield from self._python_string(emit)
        elif character in "[(":
            self._take(self._at + 1)
            yield from self._python_list(emit, "]" if character == "[" else ")", depth)
        elif character == "{":
            self._take(self._at + 1)
            yield from self._python_dict(emit, depth)
        else:
            word = yield from self._short_match(_WORD)
            if not word:
                raise MalformedError
            emit(_constant(word))

    def _python_string(self, emit: Emit) -> Steps:
        quote = self._take(self._at + 1)
        end = quote
        if (yield from self._try_word(quote)):
            if not (yield from self._try_word(quote)):
                emit('""')
                return
            end = quote * 3
        emit('"')
        while True:
            character = yield from self._peek()
            if character == quote:
                if end == quote:
                    self._take(self._at + 1)
                    break
                if (yield from self._try_word(end)):
                    break
                self._take(self._at + 1)
                emit(quoted(quote))
            elif character == "\\":
                self._take(self._at + 1)
                emit(quoted((yield from self._python_escape())))
            else:
                match = _PY_STRING[quote].match(self._text, self._at)
                assert match is not None, "the pattern takes an empty text"
                emit(quoted(self._take(match.end())))
        emit('"')

    def _python_escape(self) -> Generator[None, None, str]:
        yield from self._peek()
        kind = self._take(self._at + 1)
        if kind not in _PY_CODES:
            return _PY_ESCAPES.get(kind, "\\" + kind)
        code = ""
        while len(code) < _PY_CODES[kind]:
            digit = yield from self._peek()
            if digit not in "0123456789abcdefABCDEF":
                return f"\\{kind}{code}"
            code += self._take(self._at + 1)
        number = int(code, 16)
        return "\ufffd" if number > 0x10FFFF or 0xD800 <= number < 0xE000 else chr(number)

    def _python_list(self, emit: Emit, end: str, depth: int) -> Steps:
        emit("[")
        is_first = True
        while True:
            yield from self._skip_spaces()
            if (yield from self._try_word(end)):
                break
            if not is_first:
                yield from self._expect(",")
                yield from self._skip_spaces()
                if (yield from self._try_word(end)):
                    break
                emit(", ")
            is_first = False
            yield from self._python_value(emit, depth + 1)
        emit("]")

    def _python_dict(self, emit: Emit, depth: int) -> Steps:
        emit("{")
        is_first = True
        while True:
            yield from self._skip_spaces()
            if (yield from self._try_word("}")):
                break
            if not is_first:
                yield from self._expect(",")
                yield from self._skip_spaces()
                if (yield from self._try_word("}")):
                    break
                emit(", ")
            is_first = False
            key: list[str] = []
            yield from self._python_value(key.append, depth + 1)
            text = "".join(key)
            emit((text if text.startswith('"') else json.dumps(text, ensure_ascii=False)) + ": ")
            yield from self._skip_spaces()
            yield from self._expect(":")
            yield from self._python_value(emit, depth + 1)
        emit("}")


class GemmaValues(TextReader):
    """Calls in Gemma's notation: f{a:1,b:<escape>x<escape>}."""

    _start: Callable[..., Callable[[str], None]]

    def _gemma_call(self, quote: str) -> Steps:
        name, _ = yield from self._short_until("{")
        name = name.strip()
        if not name or any(mark in name for mark in "<>}\n"):
            raise MalformedError
        emit = self._start(name)
        yield from self._gemma_object(emit, quote, 0)

    def _gemma_object(self, emit: Emit, quote: str, depth: int) -> Steps:
        if depth > MAX_DEPTH:
            raise MalformedError
        emit("{")
        is_first = True
        while True:
            yield from self._skip_spaces()
            if (yield from self._try_word("}")):
                break
            if not is_first:
                yield from self._expect(",")
                yield from self._skip_spaces()
                emit(", ")
            is_first = False
            if (yield from self._try_word(quote)):
                key, _ = yield from self._short_until(quote)
                yield from self._skip_spaces()
                yield from self._expect(":")
            else:
                key, _ = yield from self._short_until(":")
                key = key.strip().strip('"')
            emit(json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._gemma_value(emit, quote, depth)
        emit("}")

    def _gemma_value(self, emit: Emit, quote: str, depth: int) -> Steps:
        yield from self._skip_spaces()
        if (yield from self._try_word(quote)):
            emit('"')
            yield from self._until(finder((quote,)), lambda text: emit(quoted(text)))
            emit('"')
        elif (yield from self._try_word("{")):
            yield from self._gemma_object(emit, quote, depth + 1)
        elif (yield from self._try_word("[")):
            if depth > MAX_DEPTH:
                raise MalformedError
            emit("[")
            is_first = True
            while True:
                yield from self._skip_spaces()
                if (yield from self._try_word("]")):
                    break
                if not is_first:
                    yield from self._expect(",")
                    emit(", ")
                is_first = False
                yield from self._gemma_value(emit, quote, depth + 1)
            emit("]")
        else:
            yield from self._gemma_word(emit)

    def _gemma_word(self, emit: Emit) -> Steps:
        """A number or constant, or a text without quotes."""
        found = yield from self._short_match(_BARE)
        if not found.strip():
            raise MalformedError
        emit(_constant(found.strip()))


_BARE = re.compile(r"[^,\]}\[{<\n]*")


def _constant(word: str) -> str:
    """A word of Python's notation as JSON: a constant, a number, or else a string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        number = ast.literal_eval(word) if word[:1] in "+-.0123456789" else word
    except (ValueError, SyntaxError):
        number = word
    if isinstance(number, int | float) and not isinstance(number, bool):
        text = json.dumps(number)
        if text not in ("NaN", "Infinity", "-Infinity"):
            return text
    return json.dumps(word, ensure_ascii=False)


# ---------------------------------------------------------------- text in tags


def tagged_value(reader: TextReader, form: ToolFormat, kinds: set[str], is_json: bool, emit: Emit) -> Steps:
    """Read a value up to its closing tag. A line break next to the tags is not part of it where the format writes one.

    A string is passed on as it comes. Other values are read whole, because only then their type is known. `is_json`:
    where the type is not known, a text in quotes is a JSON string.
    """
    is_string = kinds == {"string"}
    pieces: list[str] = []
    pending = ""  # a line break that may be the one before the closing tag
    breaks = form.value_end.startswith("\n")
    is_first = True

    def take(text: str) -> None:
        nonlocal pending, is_first
        if breaks and is_first and text.startswith("\n"):
            text = text[1:]
        is_first = False
        text = pending + text
        pending = "\n" if breaks and text.endswith("\n") else ""
        text = text[: len(text) - len(pending)]
        if is_string:
            emit(quoted(text))
        else:
            pieces.append(text)

    if is_string:
        emit('"')
    yield from reader._until(finder((marker_words(form.value_end)[0],)), take)
    emit('"' if is_string else _value("".join(pieces), kinds, is_json))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _value(text: str, kinds: set[str], is_json: bool) -> str:
    """A value of a type that is not only string, as JSON."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = text
    allowed = kinds | ({"integer"} if "number" in kinds else set())
    fits = not kinds or kind_of(value) in allowed
    is_quoted = isinstance(value, str) and not kinds and not is_json
    if value is not text and (fits or "string" not in kinds) and not is_quoted:
        return stripped
    if stripped in _CONSTANTS and "string" not in kinds:
        return _CONSTANTS[stripped]
    if stripped[:1] in "[{(" and "string" not in kinds:
        try:
            return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return json.dumps(text, ensure_ascii=False)
