"""A fast HTTP client for one server, with keep-alive connections, its answers, and the server's API as an Endpoint.

It does as little as possible per token, so that the server is measured and not the client."""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools
import httpx
import msgspec

from kvasir.bench.serve.datasets import Prompt
from kvasir.config.engine import LoadConfig, ModelConfig
from kvasir.errors import ConfigError, ModelError
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from kvasir.log import get_logger
from kvasir.models import hub

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


class TimedAnswer:
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


_now = time.perf_counter


def _parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is not a URL such as http://localhost:8000.")
    return parts


class Target:
    """The URL and headers of requests."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = _parts(url)
        self.url = url
        self.host = str(parts.hostname)
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path or "/"
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._netloc = parts.netloc.rpartition("@")[2]

    def head(self, size: int) -> bytes:
        return (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{self._lines}Content-Length: {size}\r\n\r\n"
        ).encode()


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._answer: TimedAnswer | None = None
        self._done: asyncio.Future[None] | None = None
        self._at = 0.0  # arrival time of the current bytes

    async def ask(self, request: bytes, answer: TimedAnswer) -> None:
        assert self.transport is not None and self._answer is None, "a connection carries one request at a time"
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
        finally:
            self._answer = None

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the same methods

    def data_received(self, data: bytes) -> None:
        self._at = _now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the reply is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection was closed ({error})" if error else "the connection was closed")

    # ------------------------------------------------------------ callbacks of the parser

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(self._at, body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and self._done is not None and not self._done.done():
            self._answer.end(self._at)
            self._done.set_result(None)

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def _fail(self, why: str) -> None:
        if self._answer is not None and self._done is not None and not self._done.done():
            self._answer.fail(_now(), why)
            self._done.set_result(None)


class LoadClient:
    """Opens a connection for each concurrent request and reuses them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[_Connection] = []
        self.num_opened = 0

    async def ask(self, body: bytes, answer: TimedAnswer) -> None:
        """Send a request. The answer is complete or has an error when this returns."""
        answer.started = _now()
        request = self.target.head(len(body)) + body
        kept = self._kept()
        if kept is not None:
            await self._ask_on(kept, request, answer)
            if answer.status or answer.ok:
                return
            answer.error = ""  # the server had closed the idle connection; try a new one
        try:
            await self._ask_on(await self._open(), request, answer)
        except OSError as error:
            answer.fail(_now(), f"no connection: {error}")

    async def _ask_on(self, connection: _Connection, request: bytes, answer: TimedAnswer) -> None:
        try:
            await connection.ask(request, answer)
        except BaseException:
            connection.close()
            raise
        if not connection.closed:
            self._idle.append(connection)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _open(self) -> _Connection:
        self.num_opened += 1
        target, loop = self.target, asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, target.host, target.port, ssl=target.tls)
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


# ---------------------------------------------------------------- the API of the server

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
logger = get_logger(__name__)
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    root: str | None  # its directory or Hub name on the server
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    base_url: str
    path: str
    is_chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        return Target(self.base_url.rstrip("/") + self.path, self.headers)

    def served(self, patience: float) -> list[ServedModel]:
        """The models in /v1/models, as soon as the server is ready, at the latest after `patience` seconds."""
        _parts(self.base_url)  # waiting would not help
        end, logged = time.monotonic() + patience, False
        while True:
            try:
                answer = httpx.get(self.base_url.rstrip("/") + "/v1/models", headers=dict(self.headers), timeout=30)
                if answer.is_success:
                    return [_served(entry) for entry in answer.json()["data"]]
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.is_client_error:
                    break
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() >= end:
                break
            if not logged:
                logger.warning("Waiting up to %g s for %s (%s)", patience, self.base_url, problem)
                logged = True
            time.sleep(_POLL_SECONDS)
        raise ConfigError(f"{self.base_url}/v1/models does not list models ({problem}).")

    def body(self, model: str, prompt: Prompt, fields: Mapping[str, Any]) -> bytes:
        made: dict[str, Any] = {"model": model}
        if self.is_chat:
            made |= {"messages": [{"role": "user", "content": prompt.content}]}
            made |= {"max_completion_tokens": prompt.max_tokens}
        else:
            made |= {"prompt": prompt.content, "max_tokens": prompt.max_tokens}
        made |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(made | dict(fields))


def _served(entry: Mapping[str, Any]) -> ServedModel:
    return ServedModel(str(entry["id"]), entry.get("root"), entry.get("max_model_len"))


def find_tokenizer(asked: str | None, model: str | None, served: ServedModel) -> Tokenizer:
    """The tokenizer of --tokenizer, or else that of the model, by its name here or on the server."""
    names = [asked] if asked else [name for name in (model, served.root, served.name) if name]
    local = [name for name in names if Path(name).expanduser().exists()]
    try:
        path = hub.find_tokenizer(ModelConfig((local or names)[0]), LoadConfig())
        return load_tokenizer(path)
    except ModelError as error:
        raise ConfigError(f"There is no tokenizer for the prompts: {error} Set --tokenizer.") from None
