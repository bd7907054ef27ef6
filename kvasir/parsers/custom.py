"""The text of a custom tool, which the model writes as the one argument of a function. API process."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.parsers.base import Content
from kvasir.parsers.reader import EndedError, MalformedError, Steps, TextReader


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
