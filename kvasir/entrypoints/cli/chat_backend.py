"""The models behind `kvasir chat` and `kvasir complete`: the protocol, and a model on a server. See chat_local.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from kvasir.errors import ConfigError, EngineError, KvasirError, RequestError

Message = Mapping[str, str]


@dataclass(slots=True, frozen=True)
class AnswerUsage:
    """Token counts of a reply."""

    prompt: int
    cached: int  # tokens of the prompt
    output: int
    finish_reason: str | None = None


Piece = str | AnswerUsage  # text as it comes, then the token counts


class Backend(Protocol):
    name: str  # of the model

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        """Stream the reply to a chat. Closing the iterator aborts the request. Errors are KvasirErrors."""

    def complete(self, prompt: str, params: Mapping[str, Any]) -> Iterator[Piece]:
        """Stream the completion of a text, likewise."""

    def describe(self) -> list[str]:
        """Lines for /stats."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- a model on a server with OpenAI's API

DEFAULT_URL = "http://localhost:8000/v1"
_TIMEOUT = httpx.Timeout(None, connect=10.0)  # no limit for the reply
_DONE = b"[DONE]"


class RemoteModel:
    """A model on a server, Kvasir's or another one. Without `model` it is the first of the server."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        try:
            self.name = model or self._first_model()
        except BaseException:
            self.close()
            raise

    def _first_model(self) -> str:
        with self._as_kvasir_errors():
            reply = self.client.get(f"{self.url}/models")
            if reply.status_code == httpx.codes.NOT_FOUND:
                hint = f"The base URL of OpenAI's API ends in /v1, such as {DEFAULT_URL}."
                raise ConfigError(f"There is no {self.url}/models. {hint}")
            _check(reply)
            found = [str(entry["id"]) for entry in reply.json()["data"]]
        if not found:
            raise EngineError(f"{self.url} has no model.")
        return found[0]

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        yield from self._stream("/chat/completions", {"messages": list(messages), **params})

    def complete(self, prompt: str, params: Mapping[str, Any]) -> Iterator[Piece]:
        yield from self._stream("/completions", {"prompt": prompt, **params})

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Piece]:
        whole = {"model": self.name, **body, "stream": True, "stream_options": {"include_usage": True}}
        with self._as_kvasir_errors(), self.client.stream("POST", self.url + path, json=whole) as reply:
            if reply.is_error:
                reply.read()
            _check(reply)
            reason = None
            thinking = False
            for data in events(reply.iter_bytes()):
                if data == _DONE:
                    return
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(_message(event))
                for choice in event["choices"]:
                    reason = choice.get("finish_reason") or reason
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield thought if thinking else f"<think>\n{thought}"
                        thinking = True
                    if text := choice.get("text") or delta.get("content"):
                        yield f"\n</think>\n\n{text}" if thinking else text
                        thinking = False
                if usage := event.get("usage"):
                    yield _usage(usage, reason)
            raise EngineError(f"{self.url} ended the stream before the reply was complete.")

    @contextmanager
    def _as_kvasir_errors(self) -> Iterator[None]:
        """Convert errors of the network and the protocol to KvasirErrors."""
        try:
            yield
        except KvasirError:
            raise
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"{self.url!r} is not a URL such as {DEFAULT_URL} ({error}).") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            hint = "start one with `kvasir serve`, or set --url."
            raise ConfigError(f"No server answers at {self.url} ({error}): {hint}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"The connection to {self.url} was lost ({type(error).__name__}: {error}).") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.url} does not reply in the format of OpenAI's API ({error!r}).") from error

    def describe(self) -> list[str]:
        return [f"server: {self.url}"]

    def close(self) -> None:
        self.client.close()


def events(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, from chunks of bytes of any size."""
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


def _check(reply: httpx.Response) -> None:
    if reply.is_success:
        return
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        was = "refuses this API key" if "authorization" in reply.request.headers else "needs an API key"
        raise ConfigError(f"The server {was}; set --api-key or KVASIR_API_KEY.")
    try:
        message = _message(reply.json())
    except (ValueError, LookupError, TypeError):
        message = f"HTTP {reply.status_code} {reply.reason_phrase}".strip()
    raise RequestError(message) if reply.is_client_error else EngineError(message)


def _message(body: Mapping[str, Any]) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, Mapping) else error)


def _usage(usage: Mapping[str, Any], reason: str | None) -> AnswerUsage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return AnswerUsage(usage["prompt_tokens"], cached, usage["completion_tokens"], reason)
