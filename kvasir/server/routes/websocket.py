"""Chat over a WebSocket at /v1/chat/completions.

A request is one JSON message, the body of the HTTP route. The replies are the messages that would be the data of its
event stream, [DONE] the last; then the next request may be sent. {"type": "cancel"} ends the running request. An error
is sent as an error body and closes the connection with code 4001 and its text.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from kvasir.server.errors import ApiError, as_api_error, openai_body
from kvasir.server.gate import WS_ERROR, may_connect
from kvasir.server.http import call_of, new_id, read_json, validated, without_unknown_fields
from kvasir.server.limits import SMALL_BODY
from kvasir.server.routes.chat import ChatJob
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import ChatRequest
from kvasir.server.state import state_of

router = APIRouter()
_TRY_LATER = 1013  # RFC 6455's registry: there is no room now


@router.websocket("/v1/chat/completions")
async def chat(socket: WebSocket) -> None:
    await socket.accept()
    if not may_connect(socket):
        await socket.close(WS_ERROR, "This page's origin is not allowed: see --allowed-origins.")
        return
    with suppress(WebSocketDisconnect):
        await Conversation(socket).run()


class _Message(NamedTuple):
    body: Any
    num_bytes: int  # held until it is answered


class Conversation:
    """One connection, which runs one request at a time."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.state = state_of(socket)
        self.call = call_of(socket)
        self._next: asyncio.Task[_Message] | None = None  # the next message, being read
        self._held = 0  # bytes of messages that are not answered yet

    async def run(self) -> None:
        try:
            while True:
                await self._answer_next()
        except WebSocketDisconnect:
            raise
        except Exception as error:
            found = as_api_error(error)
            if not found.counted:
                self.state.metrics.failed(found.cause)
            if found.cause != "disconnect":
                code = _TRY_LATER if found.cause == "overloaded" else WS_ERROR
                with suppress(ApiError, WebSocketDisconnect, RuntimeError):  # the connection has ended meanwhile
                    await self._say(encode(openai_body(found)))
                    await self.socket.close(code, _reason(found.message))
        finally:
            if self._next is not None:
                await _end(self._next)
            self._give_back(self._held)

    async def _answer_next(self) -> None:
        message = await self._next_request()
        try:
            if not _is_cancel(message.body):  # a cancel that comes too late ends nothing
                await self._answer(message.body)
        finally:
            self._give_back(message.num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._held -= num_bytes
        self.state.body_memory.give_back(num_bytes)

    def _listen(self) -> asyncio.Task[_Message]:
        if self._next is None:
            self._next = asyncio.create_task(self._read())
        return self._next

    async def _receive(self) -> _Message:
        message = await self._listen()
        self._next = None
        return message

    async def _next_request(self) -> _Message:
        seconds = self.state.config.websocket_idle_timeout
        await asyncio.wait([self._listen()], timeout=seconds)
        if not self._listen().done():
            raise ApiError(408, f"No request came in {seconds:g} s.", "timeout")
        return await self._receive()

    async def _read(self) -> _Message:
        frame = await self.socket.receive()
        if frame["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(frame.get("code", 1000))
        data = frame.pop("bytes", None) or frame.pop("text", "").encode()
        size = len(data)
        if not self.state.body_memory.take(size, size <= SMALL_BODY):
            message = "The server has no memory left for messages: try again later."
            raise ApiError(503, message, "overloaded", retry_after=1)
        self._held += size
        try:
            return _Message(await read_json(data, "The message", ChatRequest), size)
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_request") from error

    async def _answer(self, given: Any) -> None:
        if not isinstance(given, dict):
            raise ApiError(400, "The message must be a JSON object, the body of a chat request.", "invalid_request")
        if given.get("stream") is not None and given["stream"] is not True:
            raise ApiError(400, "A WebSocket always streams: leave stream out.", "invalid_request", "stream")
        call = replace(self.call, id=new_id(), arrived=time.time())
        known, _ = without_unknown_fields(given, ChatRequest, self.state.config.unknown_fields, call.id)
        body = validated(ChatRequest, {**known, "stream": True})
        job = await ChatJob.make(self.state, call, body)
        sending = asyncio.create_task(self._send(job))
        try:
            while not sending.done():
                await asyncio.wait([sending, self._listen()], return_when=asyncio.FIRST_COMPLETED)
                if self._listen().done() and not sending.done():
                    message = await self._receive()
                    self._give_back(message.num_bytes)
                    await self._interrupt(job, message.body)
            sending.result()
        finally:
            await _end(sending)

    async def _interrupt(self, job: ChatJob, message: Any) -> None:
        if not _is_cancel(message):
            raise ApiError(400, "A request is running: wait for its [DONE], or cancel it.", "invalid_request")
        await job.request.cancel()

    async def _send(self, job: ChatJob) -> None:
        request, chunks = job.request, job.chunks()
        async with request.ending():
            await request.start()
            while (output := await request.stream.next()) is not None:
                request.take(output)
                for payload in chunks.payloads(output):
                    await self._say(payload)
        for payload in chunks.last_payloads():
            await self._say(payload)
        await self._say(b"[DONE]")

    async def _say(self, payload: bytes) -> None:
        """Send a message. A client that has left ends its request as any other client that leaves."""
        try:
            await self.socket.send_text(payload.decode())
        except (WebSocketDisconnect, RuntimeError) as gone:  # starlette's second error is a RuntimeError
            raise ApiError(499, "the client disconnected", "disconnect") from gone


def _is_cancel(message: Any) -> bool:
    return isinstance(message, dict) and message.get("type") == "cancel"


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved


def _reason(message: str) -> str:
    """The text cut to the 123 bytes that a close frame can hold."""
    return message.encode()[:123].decode(errors="ignore")
