"""Answers piece by piece from a server that speaks OpenAI's interface; local.py gives the same of a model here.

Whatever goes wrong is one of Kvasir's errors, in a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import httpx

from kvasir.errors import ConfigError, EngineError, KvasirError, RequestError

DEFAULT_URL = "http://localhost:8000/v1"
CONNECT_SECONDS = 10.0  # an answer itself may take as long as it likes
_DONE = b"[DONE]"

Message = Mapping[str, Any]
Options = Mapping[str, Any]  # fields of a request: max_tokens, temperature, ...


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


class Piece(NamedTuple):
    """What is new. The last piece of an answer has its usage, where the server tells it."""

    text: str
    usage: Usage | None = None


class Source(Protocol):
    """Who answers. Closing an answer's iterator before its end aborts it."""

    def complete(self, prompt: str, options: Options) -> Iterator[Piece]: ...

    def chat(self, messages: Sequence[Message], options: Options) -> Iterator[Piece]: ...

    def close(self) -> None: ...


class Server:
    """A server at a URL such as http://localhost:8000/v1. `model`: None takes the first that it serves."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
            self.model = model or self.models()[0]
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"--url {url} is not a URL such as {DEFAULT_URL} ({error}).") from None

    def models(self) -> list[str]:
        """Names of what is served, at least one."""
        with self._told():
            answer = self._http.get("/models")
            _check(answer)
            found = [str(entry["id"]) for entry in answer.json()["data"]]
        if not found:
            raise EngineError(f"{self.url} serves no model.")
        return found

    def complete(self, prompt: str, options: Options) -> Iterator[Piece]:
        for event in self.stream("/completions", {**options, "prompt": prompt}):
            yield Piece("".join(choice.get("text") or "" for choice in event["choices"]), _usage(event))

    def chat(self, messages: Sequence[Message], options: Options) -> Iterator[Piece]:
        for event in self.stream("/chat/completions", {**options, "messages": list(messages)}):
            yield Piece("".join(choice["delta"].get("content") or "" for choice in event["choices"]), _usage(event))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a streamed answer, as they come."""
        full = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        with self._told(), self._http.stream("POST", path, json=full) as answer:
            if answer.is_error:
                answer.read()
            _check(answer)
            for payload in events(answer.iter_bytes()):
                if payload == _DONE:
                    return
                event = json.loads(payload)
                if "error" in event:
                    raise EngineError(_message(event))
                yield event
            raise EngineError(f"{self.url} ended its answer before it was complete.")

    def close(self) -> None:
        self._http.close()

    def _told(self) -> _Told:
        return _Told(self.url)


@dataclass(slots=True)
class _Told:
    """Turns what the network and the wire raise into sentences."""

    url: str

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            hint = "Start a server with `kvasir serve MODEL`, or name another with --url."
            raise ConfigError(f"Nothing answers at {self.url} ({error}). {hint}") from None
        if isinstance(error, httpx.UnsupportedProtocol):
            raise ConfigError(f"--url {self.url} is not a URL such as {DEFAULT_URL} ({error}).") from None
        if isinstance(error, httpx.HTTPError):
            raise EngineError(f"The connection to {self.url} failed ({type(error).__name__}: {error}).") from None
        if isinstance(error, ValueError | KeyError | TypeError | AttributeError) and not isinstance(error, KvasirError):
            raise EngineError(f"{self.url} does not answer as OpenAI's interface does ({error!r}).") from None


def events(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, from bytes cut anywhere."""
    rest, data = b"", []
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        message = _message(answer.json())
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {answer.status_code} {answer.reason_phrase}".strip()
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        message += " Give a key with --api-key."
    raise RequestError(message) if answer.is_client_error else EngineError(message)


def _message(body: Mapping[str, Any]) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, Mapping) else error)


def _usage(event: Mapping[str, Any]) -> Usage | None:
    found = event.get("usage")
    return None if found is None else Usage(found["prompt_tokens"], found["completion_tokens"])
