"""Scans a model's answer for reasoning and tool calls in one of the formats of formats.py. API process.

The same scanner reads streamed and whole answers, and its parts do not depend on how the text is cut. A call begins
when its name is known; until then its text is held back, and becomes content if it is malformed. From then on its
arguments are passed on as they come: JSON is copied, other notations are translated to JSON piece by piece.

Two readers stand beside it: of harmony, in which gpt-oss writes a series of messages on channels, and of the text of a
custom tool, which the model writes as the one argument of a function.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from kvasir.parsers.base import Content, OutputParser, OutputPart, PlainTextParser, Reasoning, ToolArguments, ToolCall
from kvasir.parsers.formats import TOOL_FORMATS, AnswerFormat, ReasoningFormat, ToolFormat
from kvasir.parsers.reader import MAX_NAME, EndedError, MalformedError, Steps, TextReader, finder, marker_words
from kvasir.parsers.schemas import kinds_of, resolved, says_nothing
from kvasir.parsers.values import GemmaValues, PythonValues, tagged_value

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the tool's name
MakeId = Callable[[], str]


def make_parser(
    form: AnswerFormat,
    schemas: Schemas | None,
    *,
    in_reasoning: bool = False,
    parallel: bool = True,
    make_id: MakeId | None = None,
) -> OutputParser:
    """A parser for one completion. `schemas`: the tools that may be called; None: none are, and calls stay text.
    `in_reasoning`: the prompt has opened the reasoning already."""
    if form.is_plain or (form.reasoning is None and schemas is None):
        return PlainTextParser()
    short = form.tools is not None and form.tools.short_ids
    make_id = make_id or (short_id if short else long_id)
    if form.is_harmony:
        return HarmonyReader(schemas is not None, make_id, parallel)
    return Scanner(
        form.reasoning, form.tools if schemas is not None else None, schemas or {}, in_reasoning, parallel, make_id
    )


_NAME = re.compile(r"[\w.:/-]+")
_LETTERS = string.ascii_letters + string.digits


def long_id() -> str:
    return f"call_{random.getrandbits(96):024x}"


def short_id() -> str:
    return "".join(random.choices(_LETTERS, k=9))


class Scanner(PythonValues, GemmaValues, TextReader):
    """Reads one completion of a model whose format is a row of the table."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        schemas: Schemas,
        in_reasoning: bool,
        parallel: bool,
        make_id: MakeId,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._schemas = schemas
        self._in_reasoning = in_reasoning
        self._parallel = parallel
        self._make_id = make_id
        self._num_calls = 0
        self._spaces = ""  # whitespace that is content only if more content follows
        self._begun = False  # content was added since the last marker
        super().__init__()

    def _run(self) -> Steps:
        try:
            yield from self._read_reasoning()
            yield from self._read_answer()
        except EndedError:
            if self._num_calls == 0 and not self._begun:
                self._add(Content, self._spaces)

    # ------------------------------------------------------------ reasoning

    def _read_reasoning(self) -> Steps:
        form = self._reasoning
        if form is None:
            return
        opens, closes = (tuple(each.strip() for each in texts) for texts in (form.open, form.close))
        self._held = []
        yield from self._skip_spaces()
        opened = self._in_reasoning
        for word in opens:  # a model may write it although the prompt has, too
            opened = (yield from self._try_word(word)) or opened
        spaces, self._held = "".join(self._held), None
        if not opened:
            for word in closes:  # the prompt has closed the reasoning, and the model closes it again
                if (yield from self._try_word(word)):
                    spaces = ""
            self._spaces = spaces
            return
        ends = closes
        if form.ends_at_call and self._tools is not None and not self._tools.is_bare:
            ends = (*closes, marker_words(self._tools.opening)[0])
        ending = ""  # whitespace, which is part of the reasoning if more of it follows

        def emit(text: str) -> None:
            nonlocal ending
            kept = text.rstrip()
            if kept:
                self._add(Reasoning, ending + kept)
                ending = ""
            ending += text[len(kept) :]

        yield from self._skip_spaces()
        word = yield from self._until(finder(ends), emit)
        if word not in closes:
            yield from self._read_calls(word)
        yield from self._skip_spaces()

    # ------------------------------------------------------------ the answer

    def _content(self, text: str) -> None:
        if not self._begun:
            stripped = text.lstrip()
            self._spaces += text[: len(text) - len(stripped)]
            if not stripped:
                return
            text, self._spaces, self._begun = self._spaces + stripped, "", True
        self._add(Content, text)

    def _read_answer(self) -> Steps:
        form = self._tools
        answer = ("", "") if self._reasoning is None else self._reasoning.answer
        words = set(answer) - {""}
        begins: set[str] = set()
        if form is not None:
            begins = {marker_words(text)[0] for text in (form.opening, *form.also) if text}
            words |= begins
            if form.is_bare:
                yield from self._read_bare()
        ends = self._closings()
        while True:
            known = words | ends if self._num_calls else words
            if not known:
                yield from self._rest()
            word = yield from self._until(finder(tuple(sorted(known))), self._content)
            if word in begins:
                yield from self._read_calls(word)
            elif word in answer:
                yield from self._skip_spaces()

    def _closings(self) -> set[str]:
        """Closing markers, which are dropped after a call where they are not expected."""
        form = self._tools
        if form is None:
            return set()
        return {word for text in (form.section[1], form.call[1]) for word in marker_words(text) if len(word) > 4}

    def _rest(self) -> Steps:
        while True:
            if self._at < len(self._text):
                self._content(self._take(len(self._text)))
            yield from self._more()

    def _drop_rest(self) -> Steps:
        while True:
            self._at = len(self._text)
            yield from self._more()

    def _read_bare(self) -> Steps:
        """Read calls without markers: the answer itself is one."""
        self._held = []
        yield from self._skip_spaces()
        character = yield from self._peek()
        spaces, self._held = "".join(self._held), None
        self._spaces += spaces
        form = self._tools
        assert form is not None, "only formats of tools are bare"
        if character == ("[" if form.array else "{"):
            yield from self._read_calls("")

    # ------------------------------------------------------------ calls

    def _read_calls(self, word: str) -> Steps:
        """Read calls after the first word of their opening marker. What is malformed becomes content."""
        before = self._num_calls
        self._held = [word]
        try:
            yield from self._read_section(word)
        except MalformedError as error:
            held, self._held = self._held, None
            if held:
                self._content("".join(held))
            if isinstance(error, EndedError):
                raise
        self._held = None
        if self._num_calls > before:
            if not self._parallel:
                yield from self._drop_rest()
            yield from self._skip_spaces()
            self._spaces, self._begun = "", False

    def _read_section(self, word: str) -> Steps:
        form = self._tools
        assert form is not None, "calls are read only with a format of tools"
        opening = form.opening
        if word and marker_words(opening)[:1] == (word,):
            for rest in marker_words(opening)[1:]:
                yield from self._skip_spaces()
                yield from self._expect(rest)
            opened = not form.section[0]  # the call's own marker is read
        else:
            opened = word in form.also and not form.section[0]
        yield from self._skip_spaces()
        if form.older and (yield from self._peek()) == "[":
            form = TOOL_FORMATS[form.older]
        if form.array:
            yield from self._expect("[")
        yield from self._read_each(form, opened)
        if form.section[1]:
            yield from self._try_marker(form.section[1])

    def _read_each(self, form: ToolFormat, opened: bool) -> Steps:
        while True:
            yield from self._skip_spaces()
            if form.array and (yield from self._try_word("]")):
                return
            if form.section[1] and (yield from self._try_word(marker_words(form.section[1])[0])):
                return
            if not opened and form.call[0]:
                yield from self._expect_marker(form.call[0])
            opened = False
            yield from self._read_call(form)
            if self._held is None and not self._parallel:
                return
            self._held = []
            yield from self._skip_spaces()
            if form.array:
                if not (yield from self._try_word(",")):
                    yield from self._try_word("]")
                    return
            elif form.separator.strip():
                if not (yield from self._try_word(form.separator.strip())):
                    return
            elif not form.section[1]:
                return

    def _read_call(self, form: ToolFormat) -> Steps:
        if form.arguments == "pythonic":
            yield from self._python_call()
        elif form.arguments == "gemma":
            yield from self._gemma_call(form.quote)
        elif form.arguments == "tagged":
            yield from self._tagged_call(form)
        elif form.name_end:
            yield from self._named_call(form)
        else:
            yield from self._json_call(form)
        if form.call[1] and form.arguments != "tagged":
            yield from self._try_marker(form.call[1])

    def _start(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Begin a call: the text that was held back belongs to it. Returns where its arguments go."""
        form = self._tools
        is_bare = form is not None and form.is_bare
        if name not in self._schemas and (is_bare or len(name) > MAX_NAME or not _NAME.fullmatch(name)):
            raise MalformedError
        self._held = None
        index = self._num_calls
        self._num_calls += 1
        self._add_call(index, call_id or self._make_id(), name)
        return lambda text: self._add_arguments(index, text)

    def _json_call(self, form: ToolFormat) -> Steps:
        """Read an object with the name and the arguments."""
        emit: Callable[[str], object] | None = None
        early: list[str] | None = None  # arguments before the name
        has_arguments = False
        yield from self._expect("{")
        is_first = True
        while True:
            yield from self._skip_spaces()
            if (yield from self._try_word("}")):
                break
            if not is_first:
                yield from self._expect(",")
                yield from self._skip_spaces()
            is_first = False
            key = yield from self._short_json_string()
            yield from self._skip_spaces()
            yield from self._expect(":")
            yield from self._skip_spaces()
            if key == form.name_key and emit is None:
                emit = self._start((yield from self._short_json_string()))
                if early is not None:
                    emit("".join(early))
            elif key in form.arguments_keys and not has_arguments:
                has_arguments = True
                if emit is None:
                    early = []
                    yield from self._json_arguments(early.append)
                else:
                    yield from self._json_arguments(emit)
            else:
                yield from self._copy_json(lambda text: None)
        if emit is None:
            raise MalformedError
        if not has_arguments:
            emit("{}")

    def _json_arguments(self, emit: Callable[[str], object]) -> Steps:
        """Read the arguments: an object, or the text of one in a string, or null for none."""
        character = yield from self._peek()
        if character == "{":
            yield from self._copy_json(emit)
        elif character == '"':
            yield from self._expect('"')
            yield from self._json_string(emit)
        else:
            found: list[str] = []
            yield from self._copy_json(found.append)
            text = "".join(found)
            emit("{}" if text in ("null", "") else text)

    def _named_call(self, form: ToolFormat) -> Steps:
        """Read the name up to a marker, then the arguments."""
        call_id = None
        (end,) = marker_words(form.name_end)
        name, _ = yield from self._short_until(end)
        name = name.strip()
        if form.id_end and form.id_end in name:
            name, _, call_id = name.partition(form.id_end)
            name, call_id = name.strip(), call_id.strip() or None
        if form.numbered:
            call_id = name
            name = name.rpartition(":")[0] or name
            name = name.removeprefix("functions.")
        emit = self._start(name, call_id)
        yield from self._skip_spaces()
        if (yield from self._peek_or_end()) != "{":
            emit("{}")
            return
        yield from self._json_arguments(emit)

    def _peek_or_end(self) -> Generator[None, None, str]:
        try:
            return (yield from self._peek())
        except EndedError:
            return ""

    # ------------------------------------------------------------ tags

    def _tagged_call(self, form: ToolFormat) -> Steps:
        key_word, close_word = marker_words(form.key[0])[0], marker_words(form.call[1])[0]
        name = yield from self._tagged_name(form, key_word, close_word)
        emit = self._start(name)
        root = self._schemas.get(name, {})
        found = root.get("properties")
        properties = found if isinstance(found, Mapping) else {}
        emit("{")
        is_first = True
        while True:
            yield from self._skip_spaces()
            try:
                is_key = yield from self._try_word(key_word)
            except EndedError:
                is_key = False
            if not is_key:
                break
            for word in marker_words(form.key[0])[1:]:
                yield from self._skip_spaces()
                yield from self._expect(word)
            key = yield from self._tagged_key(form)
            flag = (yield from self._short_until(form.flag_end))[0] if form.flag_end else None
            schema = properties[key] if key in properties else root.get("additionalProperties")
            emit(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            is_first = False
            kinds = kinds_of(schema, root) if flag is None else {"string"} if flag == "true" else set()
            is_json = flag == "false" or not says_nothing(resolved(schema, root))
            yield from tagged_value(self, form, kinds, is_json, emit)
        emit("}")
        yield from self._try_marker(form.call[1])

    def _tagged_name(self, form: ToolFormat, key_word: str, close_word: str) -> Generator[None, None, str]:
        """Read the name up to its end marker. Where that is only a line break, a key or the end of the call may follow
        at once."""
        if form.name_end.strip():
            name, _ = yield from self._short_until(marker_words(form.name_end)[0])
            return name.strip()
        yield from self._skip_spaces()
        name, word = yield from self._short_until("\n", key_word, close_word)
        if word != "\n":
            self._at -= len(word)  # it is read again
            if self._held:
                self._held.pop()
        name = name.strip()
        if "<" in name or "{" in name:
            raise MalformedError
        return name

    def _tagged_key(self, form: ToolFormat) -> Generator[None, None, str]:
        first, *others = marker_words(form.key[1])
        key, _ = yield from self._short_until(first)
        for word in others:
            yield from self._skip_spaces()
            yield from self._expect(word)
        return key.strip()


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, *_ENDS)
_MAX_HEADER = 512
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class HarmonyReader(TextReader):
    """Reads one completion in harmony. Without `calls`, messages to functions are content.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>The answer.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
    """

    def __init__(self, calls: bool, make_id: Callable[[], str], parallel: bool) -> None:
        self._calls = calls
        self._make_id = make_id
        self._parallel = parallel
        self._num_calls = 0
        super().__init__()

    def _run(self) -> Steps:
        # The prompt ends with <|start|>assistant, so a header comes first. Text without one is content.
        header = ""
        try:
            self._held = []
            yield from self._skip_spaces()
            if (yield from self._peek()) in "<t":
                header = yield from self._header("")
            while True:
                self._held = None
                ended = yield from self._message(header)
                if ended == _CHANNEL:
                    header = yield from self._header(_CHANNEL)
                    continue
                self._held = []
                word = yield from self._until(finder(_MARKERS), lambda text: None)
                header = yield from self._header("" if word in _ENDS else word)
        except EndedError:
            if self._held and self._num_calls == 0 and not self._parts:
                self._add(Content, "".join(self._held))

    def _header(self, text: str) -> Generator[None, None, str]:
        """Read the text up to <|message|>. A text that is too long, or ends before, is content."""
        found = [text]
        size = 0
        while True:
            word = yield from self._until(finder(_MARKERS), found.append)
            if word == _MESSAGE:
                return "".join(found)
            found.append(word)
            size = sum(map(len, found))
            if word in _ENDS or size > _MAX_HEADER:
                self._held = None
                self._add(Content, "".join(found))
                return ""

    def _message(self, header: str) -> Generator[None, None, str]:
        """Read a message's text as what its header says; return the marker that ends it."""
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient.group(1)
        emit: Callable[[str], object]
        if name.startswith("functions.") and self._calls:
            index = self._num_calls
            if index and not self._parallel:
                emit = _drop
            else:
                self._num_calls += 1
                self._add_call(index, self._make_id(), name.removeprefix("functions."))
                emit = lambda text: self._add_arguments(index, text)  # noqa: E731
        elif f"{_CHANNEL}analysis" in header:
            emit = lambda text: self._add(Reasoning, text)  # noqa: E731
        else:
            emit = lambda text: self._add(Content, text)  # noqa: E731
        return (yield from self._until(finder((*_ENDS, _START, _CHANNEL)), emit))


def _drop(text: str) -> None:
    pass


class CustomInput:
    """Reads {"input": "..."} as it comes, and gives the text. What is no such object is given as it is."""

    def __init__(self) -> None:
        self._reader = _InputReader()

    def feed(self, text: str) -> Sequence[str]:
        return [part.text for part in self._reader.feed(text) if isinstance(part, Content)]

    def finish(self) -> Sequence[str]:
        return [part.text for part in self._reader.finish() if isinstance(part, Content)]


class _InputReader(TextReader):
    def _run(self) -> Steps:
        self._held = []
        try:
            yield from self._skip_spaces()
            yield from self._expect("{")
            yield from self._skip_spaces()
            yield from self._short_json_string()
            yield from self._skip_spaces()
            yield from self._expect(":")
            yield from self._skip_spaces()
            yield from self._expect('"')
            self._held = None
            yield from self._json_string(lambda text: self._add(Content, text))
        except EndedError:
            self._add(Content, "".join(self._held or ()))
            return
        except MalformedError:
            self._add(Content, "".join(self._held or ()))
            self._held = None
            while True:
                self._add(Content, self._take(len(self._text)))
                if self._ended:
                    return
                yield


class AdaptedParser:
    """Gives custom tools their text in place of an object, and leaves out reasoning that is not asked for."""

    def __init__(self, parser: OutputParser, customs: frozenset[str], include_reasoning: bool) -> None:
        self._parser = parser
        self._customs = customs
        self._include_reasoning = include_reasoning
        self._inputs: dict[int, CustomInput] = {}

    def feed(self, text: str) -> Sequence[OutputPart]:
        return self._adapted(self._parser.feed(text))

    def finish(self) -> Sequence[OutputPart]:
        made = self._adapted(self._parser.finish())
        for index, reader in self._inputs.items():
            made += [ToolArguments(index, piece) for piece in reader.finish() if piece]
        return made

    def _adapted(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        made: list[OutputPart] = []
        for part in parts:
            if isinstance(part, Reasoning) and not self._include_reasoning:
                continue
            if isinstance(part, ToolCall) and part.name in self._customs:
                self._inputs[part.index] = CustomInput()
            if isinstance(part, ToolArguments) and part.index in self._inputs:
                made += [
                    ToolArguments(part.index, piece) for piece in self._inputs[part.index].feed(part.text) if piece
                ]
            else:
                made.append(part)
        return made
