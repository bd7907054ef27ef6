"""Connections of a server without an engine: they outlive errors, and what comes before a handshake is done waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.responses import Response, StreamingResponse

from kvasir.server.config import ServerConfig
from kvasir.server.launch import Server, _loop_factory, _uvicorn_config
from kvasir.server.protocol import Connections, WebSocketProtocol
from kvasir.server.state import ServerState


@dataclass
class Running:
    """A server in this event loop."""

    state: ServerState
    pool: Connections
    port: int

    async def ask(self, *lines: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "Host: a", "", ""]).encode() + body)
        return reader, writer


@asynccontextmanager
async def running(change: Callable[[FastAPI], None] = lambda app: None, **settings: object) -> AsyncIterator[Running]:
    state = ServerState(ServerConfig(**settings), "m")  # type: ignore[arg-type]
    pool = Connections(state.config, state.body_memory, state.metrics.failed)
    config = _uvicorn_config(state, pool)
    change(config.app)  # type: ignore[arg-type]
    server = Server(config, pool, state)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield Running(state, pool, sock.getsockname()[1])
        finally:
            server.stop()
            await serving


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:  # the server's own
        runner.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def reply(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Read one reply that has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    return head, await reader.readexactly(int(length))


# ---------------------------------------------------------------- unexpected errors


def broken(app: FastAPI) -> None:
    async def fail(request: Request) -> Response:
        raise ZeroDivisionError("nobody expects it")

    async def fail_later(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError("nobody expects it")

        return StreamingResponse(parts())

    app.add_route("/fail", fail)
    app.add_route("/fail-later", fail_later)


def test_a_connection_outlives_an_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    """It stays open, and the answer has the id and CORS headers that other errors have."""

    async def test() -> None:
        async with running(broken, allowed_origins=["http://page"]) as server:
            reader, writer = await server.ask("GET /fail HTTP/1.1", "Origin: http://page", "X-Request-Id: mine")
            head, body = await reply(reader)
            assert head.startswith("http/1.1 500 ") and b"internal_error" in body
            assert "x-request-id: mine" in head and "access-control-allow-origin: http://page" in head
            assert "connection: close" not in head
            writer.write(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reply(reader))[0].startswith("http/1.1 ")
            writer.close()
            metrics = server.state.metrics
            assert metrics.errors.labels(**metrics.labels, cause="internal")._value.get() == 1

    run(test)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")], "it is logged once, by us"


def test_a_reply_that_breaks_off_ends_its_connection() -> None:
    """Its client cannot know otherwise that the reply is not whole."""

    async def test() -> None:
        async with running(broken) as server:
            reader, writer = await server.ask("GET /fail-later HTTP/1.1")
            received = await reader.read()
            assert b"begun" in received and not received.endswith(b"0\r\n\r\n")
            writer.close()

    run(test)


def test_a_client_that_leaves_during_its_upload_is_no_failure(tmp_path: Path, log_lines: list[str]) -> None:
    async def test() -> None:
        async with running(files_dir=str(tmp_path)) as server:
            head = "POST /v1/files HTTP/1.1", "Content-Type: multipart/form-data; boundary=x", "Content-Length: 100"
            _, writer = await server.ask(*head, body=b"--x\r\n")
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
            metrics = server.state.metrics
            assert metrics.errors.labels(**metrics.labels, cause="internal")._value.get() == 0

    run(test)
    assert not [line for line in log_lines if line.startswith("ERROR")]


# ---------------------------------------------------------------- WebSocket handshakes

HANDSHAKE = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
HANDSHAKE += ["Sec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng=="]


def text_frame(text: bytes) -> bytes:
    """A short text from a client, masked with zeros."""
    return bytes([0x81, 0x80 | len(text)]) + bytes(4) + text


@pytest.mark.parametrize("with_handshake", [True, False], ids=["in one piece", "one by one"])
def test_no_frame_is_read_before_the_handshake_is_complete(with_handshake: bool) -> None:
    may_accept, heard = asyncio.Event(), list[str]()

    def slow_to_accept(app: FastAPI) -> None:
        async def route(websocket: WebSocket) -> None:
            await may_accept.wait()
            await websocket.accept()
            heard.extend([await websocket.receive_text() for _ in range(50)])
            await websocket.close()

        app.add_api_websocket_route("/slow", route)

    async def test() -> None:
        frames = b"".join(text_frame(b"%d" % number) for number in range(50))
        async with running(slow_to_accept) as server:
            reader, writer = await server.ask("GET /slow HTTP/1.1", *HANDSHAKE, body=frames if with_handshake else b"")
            await asyncio.sleep(0.1)
            if not with_handshake:
                writer.write(frames)
                await asyncio.sleep(0.1)
            (protocol,) = server.pool.open
            assert isinstance(protocol, WebSocketProtocol)
            assert protocol.queue.qsize() == 1, "a frame was read: there is more than the message to connect"
            assert not protocol.conn.reader.buffer
            may_accept.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            assert (await reader.read(2))[:1] == b"\x88"
            assert heard == [str(number) for number in range(50)]
            writer.close()

    run(test)


def test_frames_of_a_client_without_a_key_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[object]()
    monkeypatch.setattr(WebSocketProtocol, "send_receive_event_to_app", lambda self: read.append(self.close_sent))

    async def test() -> None:
        async with running(api_key=["sesame"]) as server:
            frames = text_frame(b"{}") * 20
            reader, writer = await server.ask("GET /v1/chat/completions HTTP/1.1", *HANDSHAKE, body=frames)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            assert (await reader.read(2))[:1] == b"\x88"
            writer.close()

    run(test)
    assert all(read), "only after the close frame was sent, where they are dropped"


def test_a_handshake_waits_for_the_reply_to_the_request_before_it(
    caplog: pytest.LogCaptureFixture, log_lines: list[str]
) -> None:
    """The end of a chunked body and the handshake may come in one piece. The reply must not stand among frames."""
    answered = asyncio.Event()

    def slow(app: FastAPI) -> None:
        async def route(request: Request) -> Response:
            await request.body()
            await answered.wait()
            return Response(b"reply")

        app.add_route("/slow", route, methods=["POST"])

    async def test() -> None:
        async with running(slow) as server:
            handshake = "\r\n".join(["GET /v1/chat/completions HTTP/1.1", "Host: a", *HANDSHAKE, "", ""])
            chunked = b"1\r\nx\r\n0\r\n\r\n" + handshake.encode()
            reader, writer = await server.ask("POST /slow HTTP/1.1", "Transfer-Encoding: chunked", body=chunked)
            head, body = await reply(reader)
            assert head.startswith("http/1.1 400 ") and b"handshake must wait" in body
            answered.set()
            assert await reader.read() == b""
            writer.close()

    run(test)
    assert not [line for line in log_lines if line.startswith("ERROR")]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_error_that_nobody_can_be_told_any_more_is_no_failure(
    caplog: pytest.LogCaptureFixture, log_lines: list[str]
) -> None:
    """The server ends the connection for its small frames before the application has looked at the message."""

    def ping(size: int) -> bytes:
        return bytes([0x89, 0x80 | size]) + bytes(4 + size)

    async def test() -> None:
        async with running() as server:
            frames = text_frame(b"{x") + ping(34) * 102 + ping(0) * 300
            reader, writer = await server.ask("GET /v1/chat/completions HTTP/1.1", *HANDSHAKE, body=frames)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            assert b"too many small frames" in await reader.read()
            writer.close()

    run(test)
    assert not [line for line in log_lines if line.startswith("ERROR")]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
