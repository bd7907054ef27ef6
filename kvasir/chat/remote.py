"""A server answers, Kvasir's or another one with OpenAI's interface."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from kvasir.chat.backend import Message, Piece, Usage
from kvasir.errors import ConfigError, EngineError, RequestError

_TIMEOUT = httpx.Timeout(10.0, read=600.0)


class RemoteModel:
    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        try:
            self.name = model or self._first_model()
        except BaseException:
            self.close()
            raise

    def _first_model(self) -> str:
        with self._plainly():
            reply = self.client.get(f"{self.url}/models")
            _check(reply)
            try:
                return str(reply.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ConfigError(f"{self.url}/models names no model; is this an OpenAI-like server's /v1?") from None

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Iterator[Piece]:
        body = {"model": self.name, "messages": list(messages), **params}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._plainly(), self.client.stream("POST", f"{self.url}/chat/completions", json=body) as reply:
            if reply.is_error:
                reply.read()
            _check(reply)
            reason = None
            for chunk in _chunks(reply):
                for choice in chunk.get("choices") or []:
                    reason = choice.get("finish_reason") or reason
                    if text := (choice.get("delta") or {}).get("content"):
                        yield text
                if usage := chunk.get("usage"):
                    yield _usage(usage, reason)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """What the network raises, as a sentence."""
        try:
            yield
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self.url!r} is no URL ({error}); one is http://localhost:8000/v1.") from error
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"{self.url!r} does not begin with http:// or https://.") from error
        except httpx.ConnectError as error:
            raise ConfigError(
                f"No server answers at {self.url}: start one with `kvasir serve`, or give its --url."
            ) from error
        except httpx.TransportError as error:
            raise EngineError(f"The connection to {self.url} broke off ({type(error).__name__}).") from error

    def describe(self) -> list[str]:
        return [f"server: {self.url}"]

    def close(self) -> None:
        self.client.close()


def _check(reply: httpx.Response) -> None:
    if not reply.is_error:
        return
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError("The server wants an API key: give --api-key, or set KVASIR_API_KEY.")
    try:
        said = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = f"the server answered {reply.status_code}"
    raise RequestError(str(said))


def _chunks(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in reply.iter_lines():
        if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(data)
        if error := chunk.get("error"):
            raise EngineError(str(error.get("message", "the server broke the answer off")))
        yield chunk


def _usage(usage: Mapping[str, Any], reason: str | None) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0), reason)
