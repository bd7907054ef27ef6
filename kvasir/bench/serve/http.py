"""A lean HTTP client for one server: kept-alive connections, bytes straight from the socket to an Answer.

A client that does more per token than the server would measure itself.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvasir.bench.serve.answer import Answer
from kvasir.errors import ConfigError

_now = time.perf_counter


class Target:
    """Where requests go: address, path and headers."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not a URL such as http://localhost:8000.")
        self.url = url
        self.host = parts.hostname
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
    """One request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._at = 0.0  # when the bytes at hand came

    async def ask(self, request: bytes, answer: Answer) -> None:
        assert self.transport is not None and self._answer is None, "a connection takes one request at a time"
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
        finally:
            self._answer = None

    # ------------------------------------------------------------ what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._at = _now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not speak HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection was closed ({error})" if error else "the connection was closed")

    # ------------------------------------------------------------ what the parser calls

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.take(self._at, body)

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


class Client:
    """Opens as many connections as there are requests at once, and keeps them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[_Connection] = []
        self.num_opened = 0

    async def ask(self, body: bytes, answer: Answer) -> None:
        """The answer is complete, or has its error, when this returns."""
        answer.started = _now()
        request = self.target.head(len(body)) + body
        kept = self._kept()
        if kept is not None:
            await self._ask_on(kept, request, answer)
            if answer.status or answer.ok:
                return
            answer.error = ""  # the server had closed what was kept, which is no failure
        try:
            await self._ask_on(await self._open(), request, answer)
        except OSError as error:
            answer.fail(_now(), f"no connection: {error}")

    async def _ask_on(self, connection: _Connection, request: bytes, answer: Answer) -> None:
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
