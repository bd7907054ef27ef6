"""Connections, HTTP/1.1 and WebSocket, with limits on everything a stranger can send. API process.

`Connections` bounds how many there are, says which one makes room and when their time is up. uvicorn's protocols parse
what arrives and run the application. The subclasses here bound what they take: the size of a head, the time until it is
complete, the memory of bodies. These limits hold before an API key is looked at.

A connection gets the parser's attention for one request at a time. Bytes of further requests wait unparsed, and reading
stops while too many wait, so pipelined requests take no more memory than one.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from kvasir.log import get_logger
from kvasir.server.config import ServerConfig
from kvasir.server.errors import ApiError, openai_body
from kvasir.server.gate import PROBES
from kvasir.server.http import route_path
from kvasir.server.limits import SMALL_BODY, BodyMemory
from kvasir.server.schema.base import encode

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

logger = get_logger(__name__)

SWEEP_TICKS = 5  # of uvicorn's ticks, a tenth of a second each, between two looks at the deadlines
_SPARE_CONNECTIONS = 16  # beyond the cap, for probes
_SPARE_DESCRIPTORS = 32  # of the process, half of them for these connections
_MIN_IDLE_SECONDS = 1.0  # before a connection is closed to make room
_REPORT_SECONDS = 60.0  # between two log lines about a full server
_MIN_BYTES_PER_SECOND = 16 << 10  # of a body, on average, after the time limit


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as it may have."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _descriptor_limit() -> int:
    return sys.maxsize if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _spare_descriptors() -> int:
    return min(_SPARE_DESCRIPTORS, _descriptor_limit() // 4)


class Connections:
    """The connections of one API process. `failed` counts a refusal under its cause."""

    def __init__(self, config: ServerConfig, memory: BodyMemory, failed: Callable[[str], None]) -> None:
        self.config = config
        self.memory = memory
        self.failed = failed
        self.open: set[TimedConnection] = set()  # without the spare ones
        self.idle: dict[TimedConnection, float] = {}  # since when, longest first
        self.spare: dict[TimedConnection, None] = {}  # beyond the cap, oldest first
        self._reported = -math.inf

    def admit(self, new: TimedConnection) -> bool:
        """Whether a connection may ask for anything. Beyond the cap it may only probe."""
        problem = self._shortage(new)
        if problem is not None and self._close_longest_idle():
            problem = None
        if problem is None:
            self.open.add(new)
            return True
        self._report(problem)
        self.spare[new] = None
        if len(self.spare) > min(_SPARE_CONNECTIONS, _spare_descriptors() // 2):
            next(iter(self.spare)).drop()
        return False

    def remove(self, old: TimedConnection) -> None:
        self.open.discard(old)
        self.forget(old)

    def forget(self, old: TimedConnection) -> None:
        """Look no more for a connection that is to make room."""
        self.idle.pop(old, None)
        self.spare.pop(old, None)

    def upgrade(self, old: TimedConnection, new: TimedConnection) -> None:
        """A WebSocket takes the place of the HTTP connection it began as."""
        self.remove(old)
        self.open.add(new)

    def sweep(self, connections: Iterable[Any]) -> None:
        """End those whose time is up. Called every `SWEEP_TICKS`."""
        now = time.monotonic()
        for each in list(connections):
            each.check_time(now)
        self.memory.trim()

    def _shortage(self, new: TimedConnection) -> str | None:
        most = self.config.max_connections
        if len(self.open) >= most:
            return f"{most} connections are open (--max-connections)"
        # The kernel hands out the lowest free descriptor, so a high one means that few are left.
        sock = new.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= _descriptor_limit() - _spare_descriptors():
            return f"the process may open {_descriptor_limit()} files (ulimit -n), and nearly all are in use"
        return None

    def _close_longest_idle(self) -> bool:
        for connection, since in self.idle.items():
            if time.monotonic() - since < _MIN_IDLE_SECONDS:
                return False
            connection.drop()
            return True
        return False

    def _report(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            logger.warning("new connections get 503, except for probes: %s", problem)


class TimedConnection(ABC):
    """What both protocols share: a deadline for what the client has to send, and one for what it has to read."""

    pool: Connections
    transport: asyncio.Transport
    deadline: float = math.inf
    _unsent = 0
    _sent_at = 0.0

    @abstractmethod
    def time_ran_out(self) -> None:
        """Answer, or close, because the client did not send in time."""

    def drop(self) -> None:
        """Close without a word."""
        self.pool.forget(self)
        self.transport.close()

    def check_time(self, now: float) -> None:
        """End the connection if its client does not send, or does not read, in time."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent or self._unsent == 0:
            self._sent_at = now
        self._unsent = unsent
        if now - self._sent_at > self.pool.config.send_timeout:
            self.transport.abort()
        elif now > self.deadline:
            self.time_ran_out()

    def resume_writing(self) -> None:
        """The client has read something, whatever was added since."""
        self._sent_at = time.monotonic()
        super().resume_writing()  # type: ignore[misc]

    def body_deadline(self, began: float, num_bytes: int) -> float:
        """A body must not stop, and must arrive at some speed on average."""
        seconds, now = self.pool.config.body_timeout, time.monotonic()
        return min(now, began + num_bytes / _MIN_BYTES_PER_SECOND) + seconds


_ANSWERED_WHEN_FULL = PROBES | {"/metrics"}

_SPARE_SECONDS = 5.0  # for a connection beyond the cap to send its request
_LINGER_SECONDS = 5.0  # without a byte, until a refused client's connection is closed
_MAX_LINGER_SECONDS = 30.0
_PIECE = 4096  # bytes of a head, or of a chunked body, that the parser gets at a time
_MAX_BACKLOG = 64 << 10  # unparsed bytes of further requests
_BYTES_PER_OVERHEAD = 8  # of content, for each further byte around it: every chunk takes time to parse
_MAX_FRAMES = 256.0  # WebSocket frames at once
_FRAMES_PER_SECOND = 20.0
_BYTES_PER_FRAME = 512  # that earn a further frame
_MAX_AFTER_CLOSE = 64 << 10  # bytes in which the reply to a close frame is looked for


# ---------------------------------------------------------------- HTTP


class _Reading(FlowControl):
    """Reading goes on only while few bytes wait to be parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Writer:
    """The transport as a response sees it. Closing it lets a client that still sends read the response first."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close


class _Exchange(RequestResponseCycle):
    """One request and its response."""

    _until_close = False  # the end of the connection is the end of the body

    def send(self, message: Any) -> Coroutine[Any, Any, None]:  # no coroutine of its own for every chunk
        if not self.response_started:
            self._begin(message)
        elif self._until_close and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        return super().send(message)

    def _begin(self, message: Any) -> None:
        if self.more_body:  # it is answered early, and the rest of the body is not wanted
            self.keep_alive = False
        names = [name.lower() for name, _ in message.get("headers", [])]
        if self.scope["http_version"] == "1.0" and b"content-length" not in names:  # it knows no chunks
            self._until_close = True
            self.chunked_encoding, self.expected_content_length = False, sys.maxsize


class HttpProtocol(TimedConnection, HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits."""

    # The parts of a request: nothing yet, its head, its body; then what is read only to be dropped.
    NOTHING, HEAD, BODY, LINGER = range(4)
    flow: _Reading

    def __init__(self, *args: Any, pool: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = pool
        self.limits = pool.config
        self.part = self.NOTHING
        self._is_spare = False
        self._backlog = b""
        self._at = 0  # where its unparsed bytes begin
        self._answering: RequestResponseCycle | None = None
        self._refusal: ApiError | None = None  # why a callback of the parser has raised
        self._is_replay = False  # the parser is told again what it has told already
        self._since_callback = 0  # bytes of the head
        self._head_bytes = 0
        self._body_began = 0.0
        self._body_left: int | None = None  # None: it is chunked
        self._body_bytes = 0
        self._overhead = 0  # bytes of a chunked body that are not content

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport)
        self._is_spare = not self.pool.admit(self)
        self._wait_for_request(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.remove(self)
        self._backlog, self._at = b"", 0
        for each in (self._answering, *(cycle for cycle, _ in self.pipeline)):
            if each is not None and not each.response_complete:
                each.disconnected = True
                each.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _wait_for_request(self, seconds: float) -> None:
        self.part = self.NOTHING
        now = time.monotonic()
        self.deadline = now + (_SPARE_SECONDS if self._is_spare else seconds)
        self.pool.idle.pop(self, None)
        if not self._is_spare:
            self.pool.idle[self] = now

    def time_ran_out(self) -> None:
        if self.part in (self.NOTHING, self.LINGER):
            self.drop()
        elif self.part == self.BODY and self.flow.read_paused:
            self._extend_body()  # it is the server that does not read
        else:
            what = "head" if self.part == self.HEAD else "body"
            self._refuse(ApiError(408, f"The {what} of the request took too long to arrive.", "timeout"))

    def close(self) -> None:
        """Close after a response. A client that still sends would not read it if the connection ended now."""
        if self.part != self.BODY:
            self.transport.close()
            return
        self._backlog, self._at = b"", 0
        self.part, self._body_began = self.LINGER, time.monotonic()
        self.deadline = self._body_began + _LINGER_SECONDS
        if not self._is_spare:
            self.pool.idle[self] = self._body_began  # it may make room
        if self.transport.can_write_eof():  # TLS has no such thing; there the client goes by Content-Length
            self.transport.write_eof()
        self.flow.held = False
        self.flow.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that does not reach the application, and end the connection."""
        self.pool.failed(error.cause)
        exchange = self._answering
        if exchange is not None and not exchange.response_complete:
            exchange.disconnected = True
            exchange.message_event.set()
            if exchange.response_started:  # there is no room for another answer
                self.transport.close()
                return
        body = encode(openai_body(error))
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(),
            *(name + b": " + value for name, value in self.server_state.default_headers),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        if error.retry_after is not None:
            lines.append(b"retry-after: %d" % math.ceil(error.retry_after))
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.part = self.BODY  # whatever it is, it may still be on its way
        self.close()

    # ------------------------------------------------------------ bytes in

    def data_received(self, data: bytes) -> None:
        if self.part == self.LINGER:
            now = time.monotonic()
            self.deadline = min(now + _LINGER_SECONDS, self._body_began + _MAX_LINGER_SECONDS)
            return
        self._backlog = self._backlog[self._at :] + data if self._backlog else data
        self._at = 0
        self._feed()

    def _feed(self) -> None:
        """Give the parser what it may have: everything up to the end of the request that is being read."""
        end = len(self._backlog)
        while self._at < end and self._may_parse():
            if self.part == self.NOTHING:
                self._begin_head()
            start, self._at = self._at, self._end_of_piece()
            piece = memoryview(self._backlog)[start : self._at]
            self._since_callback += len(piece)
            if self.part == self.BODY and self._body_left is None:
                self._overhead += len(piece)
            try:
                self.parser.feed_data(piece)
                self._check_progress()
            except httptools.HttpParserUpgrade as upgrade:
                self._at = start + upgrade.args[0]
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                    return
                if self.part == self.BODY:
                    self._parse_body_of_upgrade()
            except (httptools.HttpParserError, ApiError) as error:
                self._backlog, self._at = b"", 0
                given = error if isinstance(error, ApiError) else self._refusal
                self._refuse(given or ApiError(400, "The request is not valid HTTP/1.1.", "invalid_request"))
                return
            end = len(self._backlog)
        if self._at >= len(self._backlog):
            self._backlog, self._at = b"", 0
        self.flow.held = len(self._backlog) - self._at > _MAX_BACKLOG
        if self.flow.held:
            self.flow.pause_reading()

    def _may_parse(self) -> bool:
        if self.transport.is_closing() or self.part == self.LINGER:
            return False
        return self.part == self.BODY or not self._is_answering()

    def _end_of_piece(self) -> int:
        if self.part == self.BODY:
            size = _PIECE if self._body_left is None else max(1, self._body_left)
            return min(len(self._backlog), self._at + size)
        end = self._backlog.find(b"\r\n\r\n", self._at, self._at + _PIECE)
        return min(len(self._backlog), self._at + _PIECE) if end < 0 else end + 4

    def _parse_body_of_upgrade(self) -> None:
        """Read the body of a request that asks for an unknown protocol, such as h2c, which is ignored.

        The parser takes the body for bytes of that protocol, and would go on with it as with the next request. Another
        parser is told of the head again, without what nobody knows.
        """
        head = b"transfer-encoding: chunked" if self._body_left is None else b"content-length: %d" % self._body_left
        self._is_replay = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % head)
        self._is_replay = False

    def _begin_head(self) -> None:
        self._unset_keepalive_if_required()
        self.part = self.HEAD
        self._since_callback = self._head_bytes = 0
        self.deadline = time.monotonic() + (_SPARE_SECONDS if self._is_spare else self.limits.header_timeout)
        self.pool.idle.pop(self, None)

    def _check_progress(self) -> None:
        """Bound what the parser keeps, or skips, without a callback."""
        limits, unseen = self.limits, self._since_callback - _PIECE
        if self.part == self.HEAD and unseen > limits.max_header_line_bytes:
            raise self._line_too_long()
        if self.part == self.HEAD and self._head_bytes + unseen > limits.max_header_bytes:
            raise self._head_too_long()
        if self.part == self.BODY:
            if self._overhead > limits.max_header_bytes + self._body_bytes // _BYTES_PER_OVERHEAD:
                message = "The chunks of the body are too small, or have too long extensions or trailers."
                raise ApiError(400, message, "invalid_request")
            self._extend_body()

    def _extend_body(self) -> None:
        self.deadline = self.body_deadline(self._body_began, self._body_bytes)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: an upgrade that is not known is ignored, as RFC 9110 allows, and any client could fill the log."""

    # ------------------------------------------------------------ the parser's callbacks

    def _fail(self, error: ApiError) -> None:
        self._refusal = error
        raise error

    def _line_too_long(self) -> ApiError:
        most = self.limits.max_header_line_bytes
        return ApiError(431, f"A header is longer than {most} bytes (--max-header-line-bytes).", "too_large")

    def _head_too_long(self) -> ApiError:
        most = self.limits.max_header_bytes
        return ApiError(431, f"The headers are longer than {most} bytes (--max-header-bytes).", "too_large")

    def on_message_begin(self) -> None:
        if not self._is_replay:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_replay:
            return
        self._since_callback = 0
        super().on_url(url)
        most = self.limits.max_url_bytes
        if len(self.url) > most:
            self._fail(ApiError(414, f"The URL is longer than {most} bytes (--max-url-bytes).", "too_large"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replay:
            return
        limits, size = self.limits, len(name) + len(value) + 4
        self._since_callback = 0
        self._head_bytes += size
        if size > limits.max_header_line_bytes:
            self._fail(self._line_too_long())
        if self._head_bytes > limits.max_header_bytes:
            self._fail(self._head_too_long())
        if self.part == self.BODY:
            return  # a trailer, which nothing reads: it must not join the headers that were checked
        if len(self.headers) >= limits.max_header_count:
            most = limits.max_header_count
            self._fail(ApiError(431, f"There are more than {most} headers (--max-header-count).", "too_large"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_replay:
            return
        version, method = self.parser.get_http_version(), self.parser.get_method()
        self.scope["method"] = method.decode("ascii")
        self.scope["http_version"] = version
        parsed = httptools.parse_url(self.url)
        path = urllib.parse.unquote(parsed.path.decode("ascii"))
        asked = route_path({"path": path, "root_path": self.limits.path_prefix})
        if self._is_spare and (asked.rstrip("/") not in _ANSWERED_WHEN_FULL or self.parser.should_upgrade()):
            self._fail(ApiError(503, "The server has too many connections.", "overloaded", retry_after=1))
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_handshake()
            return
        self.scope["path"] = self.root_path + path
        self.scope["raw_path"] = self.root_path.encode("ascii") + parsed.path
        self.scope["query_string"] = parsed.query or b""
        self._begin_body()
        exchange = _Exchange(
            scope=self.scope,
            transport=cast(asyncio.Transport, _Writer(self)),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and not self._is_spare and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle = exchange
        if self._is_answering():  # its head came in one piece with the end of another request
            self.pipeline.appendleft((exchange, self.app))
        else:
            self._start_asgi_task(exchange, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _begin_body(self) -> None:
        self.part, self._body_began = self.BODY, time.monotonic()
        self._body_bytes = self._overhead = 0
        headers = dict(self.headers)
        self._body_left = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        self._extend_body()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_left is None:
            self._overhead -= len(body)
        else:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.part == self.BODY and self.parser.should_upgrade() and self._body_left != 0:
            return  # the body is still to come: see _parse_body_of_upgrade
        super().on_message_complete()
        self.part, self.deadline = self.NOTHING, math.inf  # until it is answered, nothing is expected

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self.part == self.LINGER or self._is_answering():
            return
        if self._backlog:
            self.loop.call_soon(self._feed)
        elif self.part == self.NOTHING:
            self._wait_for_request(self.limits.keep_alive_timeout)

    # ------------------------------------------------------------ WebSocket handshakes

    def _check_handshake(self) -> None:
        """The library that parses the handshake again has limits of its own, and no answer to what is beyond them."""
        names = {name for name, _ in self.headers}
        if b"transfer-encoding" in names or dict(self.headers).get(b"content-length", b"0") != b"0":
            self._fail(ApiError(400, "A WebSocket handshake has no body.", "invalid_request"))
        if self._is_answering():  # its reply would stand among the frames
            message = "A WebSocket handshake must wait for the reply to the request before it."
            self._fail(ApiError(400, message, "invalid_request"))
        longest = max((len(name) + len(value) + 4 for name, value in self.headers), default=0)
        if len(self.url) + 32 > MAX_LINE_LENGTH:
            self._fail(ApiError(414, "The URL is too long for a WebSocket.", "too_large"))
        if longest > MAX_LINE_LENGTH or len(self.headers) > MAX_NUM_HEADERS:
            self._fail(ApiError(431, "The headers are too long for a WebSocket.", "too_large"))

    def handle_websocket_upgrade(self) -> None:
        rest, self._backlog = self._backlog[self._at :], b""
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketProtocol):
            self.pool.upgrade(self, protocol)
            if not protocol.handshake_initiated:  # the library has not understood it, and says nothing
                self.transport.close()
            if not self.transport.is_closing():
                protocol.wait_for_handshake(rest)


# ---------------------------------------------------------------- WebSocket


class WebSocketProtocol(TimedConnection, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with limits on frames that carry little, and on messages that do not end."""

    def __init__(self, *args: Any, pool: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = pool
        self._early: bytes | None = None  # what came behind a handshake that is not complete
        self._frames_left = _MAX_FRAMES
        self._counted_at = time.monotonic()
        self._after_close = 0  # bytes
        self._fragments = 0  # bytes of an incomplete message in complete frames
        self._message_began = 0.0
        self._held = 0  # bytes of an incomplete message
        self.close_timeout = _LINGER_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.remove(self)
        self._drop_message()
        super().connection_lost(exc)

    def time_ran_out(self) -> None:
        self._fail(1008, "The message took too long to arrive.")

    def wait_for_handshake(self, rest: bytes) -> None:
        """Read no frames, nor the `rest` that came with the handshake, until the application has accepted it."""
        self._early = rest
        self.transport.pause_reading()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self._early is not None and self.handshake_complete:
            early, self._early = self._early, None
            self.loop.call_soon(self._begin_frames, early)  # a refused client's close frame comes first

    def _begin_frames(self, early: bytes) -> None:
        self.data_received(early)
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            piece = data[start : start + _PIECE]
            if self.close_sent:
                self._after_close += len(piece)
                if self._after_close > _MAX_AFTER_CLOSE:
                    return  # a client that still sends would not read the close frame if the connection ended now
            super().data_received(piece)
            self._hold(0 if self.close_sent else self._fragments + len(self.conn.reader.buffer))

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        if frames and not self._may_send(len(frames), sum(len(frame.data) for frame in frames)):
            self.conn.events.clear()
            self._fail(1008, "There are too many small frames.")
            return
        for frame in frames:
            if not frame.opcode & 8:  # not a control frame
                self._fragments = 0 if frame.fin else self._fragments + len(frame.data)
        super().handle_events()
        for frame in frames:
            frame.data = b""  # the parser keeps its last frame until the next one

    def _may_send(self, num_frames: int, num_bytes: int) -> bool:
        """Frames cost time to parse, pings an answer: a client has so many at once, and more by time and by content."""
        now = time.monotonic()
        earned = (now - self._counted_at) * _FRAMES_PER_SECOND + num_bytes / _BYTES_PER_FRAME
        self._counted_at = now
        self._frames_left = min(_MAX_FRAMES, self._frames_left + earned) - num_frames
        return self._frames_left >= 0

    def _hold(self, num_bytes: int) -> None:
        """Account for the incomplete message."""
        memory = self.pool.memory
        memory.give_back(self._held)
        self._held, before = 0, self._held
        if not memory.take(num_bytes, num_bytes <= SMALL_BODY):
            self._fail(1013, "The server has no memory left for messages: try again later.")
            return
        if num_bytes == 0:
            self.deadline = math.inf
        else:
            if before == 0:
                self._message_began = time.monotonic()
            self.deadline = self.body_deadline(self._message_began, num_bytes)
        self._held = num_bytes

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent and not is_utf8(b"".join(self.frames)):
            self._fail(1007, "The message is not UTF-8.")  # uvicorn would log it with a traceback
        else:
            super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        if self.conn.parser_exc is not None:
            self.conn.parser_exc.__traceback__ = None  # its frames hold what was parsed
        if self.conn.close_sent is None:  # the handshake is not complete, so there is nobody to tell
            self.transport.abort()
        else:
            self._end(self.conn.close_sent.code, self.conn.close_sent.reason)

    def _drop_message(self) -> None:
        """Free an incomplete message now: a connection is part of cycles, so it may be long until it is collected."""
        self.frames.clear()
        self.conn.reader.buffer.clear()
        self._fragments = 0
        self._hold(0)

    def _fail(self, code: int, reason: str) -> None:
        """End the connection from outside the application."""
        if self.close_sent or self.transport.is_closing():
            self._drop_message()
            self.transport.abort()
        else:
            self.conn.fail(code, reason)
            self._end(code, reason)

    def _end(self, code: int, reason: str) -> None:
        """Send the close frame that is ready, and wait a little for the client to read it."""
        self._drop_message()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
