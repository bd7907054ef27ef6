"""The streamed answer to one request: arrival times of its chunks, token counts and errors."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    """The fields of a chunk that are used; others are skipped without decoding."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Times are from `time.perf_counter`."""

    __slots__ = ("_rest", "done", "ended", "error", "late", "pieces", "started", "status", "text", "times", "usage")

    def __init__(self, keep_text: bool = False) -> None:
        self.started = 0.0
        self.ended = 0.0
        self.late = 0.0  # seconds by which the client sent it too late
        self.times = array("d")  # arrival times of chunks with text
        self.usage: _Usage | None = None
        self.text: list[str] | None = [] if keep_text else None
        self.status = 0
        self.error = ""
        self.done = False
        self._rest = b""

    def feed(self, now: float, data: bytes) -> None:
        """Add bytes of the body, split at any place."""
        if self.status != 200:
            self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._feed_event(now, line[5:].strip())

    def _feed_event(self, now: float, payload: bytes) -> None:
        if payload == _DONE:
            self.done = True
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            self.error = f"not a chunk of OpenAI's API: {error}"
            return
        if event.error is not None:
            self.error = _message(event.error)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            if text:
                self.times.append(now)
                if self.text is not None:
                    self.text.append(text)

    def end(self, now: float) -> None:
        self.ended = now
        if self.status != 200:
            self.error = self.error or f"HTTP {self.status}: {_message_in(self._rest)}"
        elif not self.done:
            self.error = self.error or "the stream ended before it was complete"
        elif not self.times and not self.error and not self.num_tokens:
            self.error = "the answer has no tokens"
        self._rest = b""

    def fail(self, now: float, error: str) -> None:
        self.ended, self.error = now, self.error or error

    # ------------------------------------------------------------ results

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens as the server reports it, or else the number of chunks."""
        counted = None if self.usage is None else self.usage.completion_tokens
        return len(self.times) if counted is None else counted

    @property
    def first(self) -> float:
        """Seconds to the first token; without any text, seconds to the end."""
        return (self.times[0] if self.times else self.ended) - self.started

    @property
    def last(self) -> float:
        """Seconds to the last token."""
        return (self.times[-1] if self.times else self.ended) - self.started

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def _message_in(body: bytes) -> str:
    try:
        return _message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
