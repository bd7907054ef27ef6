"""Streamed replies: server-sent events, or lines of JSON, straight to ASGI.

The loop in EventStream awaits the engine's stream; everything between an output and its bytes is synchronous. A client
that disconnects ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir.outputs import RequestOutput
from kvasir.server.api_request import ApiRequest
from kvasir.server.errors import as_api_error, openai_body
from kvasir.server.http import ClientGone, unless_disconnected
from kvasir.server.schema.base import encode

DONE = b"data: [DONE]\n\n"
# An error found within this many seconds becomes the response's status; later ones are reported as an event.
PATIENCE = 2.0


class StreamWriter(Protocol):
    """Writes one reply, frame by frame."""

    def write(self, output: RequestOutput) -> bytes:
        """The frames of an output; empty if it has nothing to show yet."""

    def finish(self) -> bytes:
        """The frames after the last output."""

    def fail(self, error: Exception) -> bytes:
        """The last frame of a stream that fails after its start."""


class EventStream(Response):
    """Runs a request and sends each output as soon as it comes."""

    def __init__(self, request: ApiRequest, writer: StreamWriter, media_type: str = "text/event-stream") -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self.request = request
        self.writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def start() -> None:
            nonlocal started
            started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        try:
            async with unless_disconnected(receive):
                async with self.request.ending():
                    await self._run(start, send)
                await send({"type": "http.response.body", "body": self.writer.finish()})
        except ClientGone:
            if not started:
                raise
        except Exception as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": self.writer.fail(error)})

    async def _run(self, start: Callable[[], Awaitable[None]], send: Send) -> None:
        first = asyncio.ensure_future(self._first_frame())
        try:
            await asyncio.wait([first], timeout=PATIENCE)
            if first.done():
                first.result()  # raises before the response has started, which makes it a status
            await start()
            frame = await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait([first])
            elif not first.cancelled():
                first.exception()  # marks it as retrieved: the client may have left before it was looked at
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        # In a task of its own: an output that woke this one would go through every coroutine that awaits it.
        await asyncio.create_task(self._send_rest(send))

    async def _send_rest(self, send: Send) -> None:
        take, write, next_output = self.request.take, self.writer.write, self.request.stream.next
        while (output := await next_output()) is not None:
            take(output)
            if frame := write(output):
                await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _first_frame(self) -> bytes:
        """Start the request; return its first frame that is not empty."""
        await self.request.start()
        while (output := await self.request.stream.next()) is not None:
            self.request.take(output)
            if frame := self.writer.write(output):
                return frame
        return b""


# ---------------------------------------------------------------- OpenAI's format


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class PayloadWriter(Protocol):
    """Writes a reply as JSON objects, for events and for WebSocket messages."""

    def payloads(self, output: RequestOutput) -> Sequence[bytes]:
        """The objects of an output."""

    def last_payloads(self) -> Sequence[bytes]:
        """The objects after the last output."""


class OpenAIEvents:
    """One event for each JSON object, then [DONE]."""

    def __init__(self, writer: PayloadWriter) -> None:
        self._payloads = writer.payloads
        self._last_payloads = writer.last_payloads

    def write(self, output: RequestOutput) -> bytes:
        payloads = self._payloads(output)
        return event(payloads[0]) if len(payloads) == 1 else b"".join(map(event, payloads))

    def finish(self) -> bytes:
        return b"".join(map(event, self._last_payloads())) + DONE

    def fail(self, error: Exception) -> bytes:
        return event(encode(openai_body(as_api_error(error)))) + DONE
