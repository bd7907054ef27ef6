"""The outermost ASGI layer: gives every request an id, checks its API key and body size, counts how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from fastapi import WebSocket
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.server.api_keys import ANYBODY, ApiKey, KeyRing
from kvasir.server.errors import ApiError, as_api_error, error_response, too_large
from kvasir.server.http import GOOD_ID, Call, attach, is_good_id, new_id, route_path
from kvasir.server.large_bodies import LargeReply
from kvasir.server.limits import SMALL_BODY, BodyMemory
from kvasir.server.state import state_of

PROBES = frozenset({"/health", "/ready", "/ping"})  # they need no key: orchestrators have none
WS_ERROR = 4001

Counted = Callable[[str, str, int, float], None]  # method, route, status, seconds
Failed = Callable[[str], None]  # cause


class Gate:
    """Plain ASGI middleware; only CORS is further out."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        max_bytes: int,
        memory: BodyMemory,
        replies: BodyMemory,
        count: Counted,
        failed: Failed,
        echo_ids: bool = True,
        public: frozenset[str] = frozenset(),
        guards: Mapping[str, Callable[[str | None], None]] | None = None,
        root_path: str = "",
    ) -> None:
        """`public`: paths that need no key: static pages, which a browser loads before it can send one.
        `guards`: paths whose POST has a key of its own, and what raises unless it is given that key.

        `root_path` is set here and not in uvicorn, which would add it to paths that already have it.
        """
        self.app = app
        self.keys = keys
        self.max_bytes = max_bytes
        self.memory = memory
        self.replies = replies
        self.count = count
        self.failed = failed
        self.echo_ids = echo_ids
        self.pages = public
        self.public = PROBES | public
        self.guards = guards or {}
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, headers, status = time.perf_counter(), Headers(scope=scope), 500
        call, body = self._call(scope, headers), _Body(receive, self.max_bytes, self.memory)
        large: LargeReply | None = None
        sent: Message | None = None  # the last part of the reply that was sent

        async def send_with_id(message: Message) -> None:
            nonlocal status, large, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.echo_ids:
                    message["headers"] = [*message["headers"], (b"x-request-id", call.id.encode("latin-1"))]
                sizes = [int(value) for name, value in message["headers"] if name.lower() == b"content-length"]
                if sizes and max(sizes) > SMALL_BODY:
                    large = LargeReply(message, send, self.replies)
                    return
            if large is None or await large.send(message):
                await send(message)
            sent = message if large is None or large.refused is None else None

        try:
            self._admit(scope, headers, call)
            await self.app(scope, body.receive, send_with_id)
            if large is not None and large.refused is not None:
                raise large.refused  # `send_with_id` cannot send this: what refers to itself stays until a collection
        except Exception as raised:  # by `_admit`, by a large reply, or one that no handler expects
            if (error := self._error_of(raised, sent)) is not None:
                large = None  # it waits for a body that does not come
                await error_response(error, call.path, call.id)(scope, receive, send_with_id)
        finally:
            body.give_back()
            if large is not None:
                large.give_back(self.memory)
            route, took = getattr(scope.get("route"), "path", "other"), time.perf_counter() - started
            self.count(scope["method"], route, status, took)

    def _error_of(self, raised: Exception, sent: Message | None) -> ApiError | None:
        """Count an exception and return the error to send, if no reply was sent. It is raised again if only a part was
        sent: uvicorn then logs it and closes the connection, so that the client knows."""
        if sent is not None and (sent["type"] != "http.response.body" or sent.get("more_body", False)):
            self.failed("internal")
            raise raised
        error = as_api_error(raised)
        self.failed(error.cause)
        return error if sent is None else None

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        call = self._call(scope, headers)
        try:
            self._admit(scope, headers, call)
        except ApiError as error:
            self.failed(error.cause)
            await receive()  # the handshake
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": WS_ERROR, "reason": error.message[:120]})
        else:
            await self.app(scope, receive, send)

    def _call(self, scope: Scope, headers: Headers) -> Call:
        scope["root_path"] = self.root_path
        given = headers.get("x-request-id", "")
        good = given if is_good_id(given) else new_id()
        path = route_path(scope)
        if path.endswith("/") and path.strip("/") and path[:-1] not in self.pages:
            # A redirect would lead out of a proxy's prefix or TLS. Pages need theirs: their links are relative.
            scope["path"], path = scope["path"][:-1], path[:-1]
        call = Call(good, path, traceparent=headers.get("traceparent"))
        attach(scope, call)
        return call

    def _admit(self, scope: Scope, headers: Headers, call: Call) -> None:
        given = headers.get("x-request-id")
        if given is not None and given != call.id:
            raise ApiError(400, f"X-Request-Id {GOOD_ID}", "invalid_request", "X-Request-Id")
        if call.path in self.guards and scope.get("method") == "POST":
            self.guards[call.path](_presented(headers))
        elif call.path not in self.public and call.path.removesuffix("/") not in self.pages:
            call.key = self._key(headers)
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            message = "Send the body as it is: this server reads no Content-Encoding."
            raise ApiError(415, message, "invalid_request", "Content-Encoding")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise too_large(_too_long(self.max_bytes))

    def _key(self, headers: Headers) -> ApiKey:
        if self.keys.is_open:
            return ANYBODY
        presented = _presented(headers)
        key = self.keys.find(presented)
        if key is None:
            message = "Incorrect API key provided." if presented else "No API key: send Authorization: Bearer KEY."
            raise ApiError(401, message, "auth", code="invalid_api_key")
        return key


def _presented(headers: Headers) -> str:
    """The key that a client sends; empty if it sends none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return (key if kind.lower() == "bearer" else headers.get("x-api-key", "")).strip()


class _Body:
    """Collects a body within limits: Content-Length may be wrong. It is accounted for until the reply.

    The application gets it in one piece. A body that does not arrive is freed here at once; in the application it would
    stay in the frames of a traceback until the garbage collector finds them.
    """

    def __init__(self, receive: Receive, max_bytes: int, memory: BodyMemory) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._memory = memory
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_read = False

    async def receive(self) -> Message:
        if self._is_read:
            return await self._receive()
        try:
            while not self._is_read:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._add(message.get("body", b""))
                self._is_read = not message.get("more_body", False)
            return {"type": "http.request", "body": b"".join(self._pieces), "more_body": False}
        finally:
            self._pieces.clear()

    def _add(self, piece: bytes) -> None:
        # FastAPI would turn other exceptions into a 400.
        if self._num_bytes + len(piece) > self._max_bytes:
            raise HTTPException(413, _too_long(self._max_bytes))
        if piece and not self._memory.take(len(piece), self._num_bytes + len(piece) <= SMALL_BODY):
            raise HTTPException(503, "The server has no memory left for bodies.", {"Retry-After": "1"})
        self._num_bytes += len(piece)
        self._pieces.append(piece)

    def give_back(self) -> None:
        self._memory.give_back(self._num_bytes)


def _too_long(max_bytes: int) -> str:
    return f"The body is longer than the {max_bytes} bytes that this server takes (--max-request-bytes)."


def may_connect(socket: WebSocket) -> bool:
    """Whether a WebSocket comes from a page of this server or of an origin in --allowed-origins.

    Browsers apply CORS to HTTP alone, so a WebSocket's origin is checked here.
    """
    origin = socket.headers.get("origin")
    allowed = state_of(socket).config.allowed_origins
    try:
        own = urlsplit(origin or "").netloc == socket.headers.get("host")
    except ValueError:  # it is no URL
        return False
    return origin is None or own or origin in allowed or "*" in allowed
