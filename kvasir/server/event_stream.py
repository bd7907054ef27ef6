"""Streams of server-sent events, straight to ASGI: no layer that a token need not pass.

A client that goes away cancels what was made for it, whether it streams or waits for one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# Errors found within this time get a status of their own; a stream that starts later reports them as an event.
PATIENCE = 2.0


class ClientGone(Exception):
    """Nobody is left to answer."""


@asynccontextmanager
async def unless_disconnected(receive: Receive) -> AsyncIterator[None]:
    """Cancel this block when the client goes away, and raise ClientGone. The request must have been read."""
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"
    watcher = asyncio.create_task(_until_disconnected(receive))
    watcher.add_done_callback(lambda done: None if done.cancelled() else task.cancel("client gone"))
    try:
        yield
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled() or task.uncancel() > 0:
            raise  # somebody else's
        raise ClientGone from None
    finally:
        watcher.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Sends what a generator gives, as it comes; closes it when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        on_error: Callable[[Exception], bytes],
        media_type: str = "text/event-stream",
    ) -> None:
        """`on_error` makes the last frame of a stream that fails after it has begun."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self.frames = frames
        self.on_error = on_error
        self._first: asyncio.Future[bytes] | None = None

    async def prime(self, receive: Receive) -> EventStream:
        """Wait for the first frame, but not for ever: what it raises can still become a status."""
        self._first = asyncio.ensure_future(anext(self.frames, b""))
        try:
            async with unless_disconnected(receive):
                await asyncio.wait([self._first], timeout=PATIENCE)
                if self._first.done():
                    self._first.result()
        except BaseException:
            await self._close()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with unless_disconnected(receive):
                if self._first is not None:
                    await send({"type": "http.response.body", "body": await self._first, "more_body": True})
                async for frame in self.frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except ClientGone:
            pass
        except Exception as error:
            await send({"type": "http.response.body", "body": self.on_error(error)})
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait([self._first])
        await self.frames.aclose()
