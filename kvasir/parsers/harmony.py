"""Reads harmony, the format of gpt-oss: an answer is a series of messages on channels. API process.

<|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>The answer.<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from kvasir.parsers.base import Content, Reasoning
from kvasir.parsers.reader import EndedError, Steps, TextReader, finder

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, *_ENDS)
_MAX_HEADER = 512
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class HarmonyReader(TextReader):
    """Reads one completion. Without `calls`, messages to functions are content."""

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
        """The text up to <|message|>. A text that is too long, or ends before, is content."""
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
