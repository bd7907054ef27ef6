"""The outermost ASGI layer: gives every request an id, checks its API key and body size, counts how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import WebSocket
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.server.api_keys import ApiKey, KeyRing
from kvasir.server.errors import ApiError, error_response, too_large
from kvasir.server.http import GOOD_ID, Call, attach, is_good_id, new_id
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
        count: Counted,
        failed: Failed,
        echo_ids: bool = True,
        public: frozenset[str] = frozenset(),
    ) -> None:
        """`public`: paths that need no key: static pages, which a browser loads before it can send one."""
        self.app = app
        self.keys = keys
        self.max_bytes = max_bytes
        self.count = count
        self.failed = failed
        self.echo_ids = echo_ids
        self.public = PROBES | public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, headers, status = time.perf_counter(), Headers(scope=scope), 500
        call = self._call(scope, headers)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.echo_ids:
                    message["headers"] = [*message["headers"], (b"x-request-id", call.id.encode("latin-1"))]
            await send(message)

        try:
            self._admit(scope, headers, call)
        except ApiError as error:
            self.failed(error.cause)
            await error_response(error, call.path, call.id)(scope, receive, send_with_id)
        else:
            await self.app(scope, _limited(receive, self.max_bytes), send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.count(scope["method"], route, status, time.perf_counter() - started)

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
        given = headers.get("x-request-id", "")
        call = Call(given if is_good_id(given) else new_id(), scope["path"], traceparent=headers.get("traceparent"))
        attach(scope, call)
        return call

    def _admit(self, scope: Scope, headers: Headers, call: Call) -> None:
        given = headers.get("x-request-id")
        if given is not None and given != call.id:
            raise ApiError(400, f"X-Request-Id {GOOD_ID}", "invalid_request", "X-Request-Id")
        if call.path not in self.public:
            call.key = self._key(headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise too_large(_too_long(self.max_bytes))

    def _key(self, headers: Headers) -> ApiKey:
        if self.keys.is_open:
            return self.keys.find(None) or ApiKey("")
        kind, _, presented = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            presented = headers.get("x-api-key", "")
        key = self.keys.find(presented.strip())
        if key is None:
            message = "Incorrect API key provided." if presented else "No API key: send Authorization: Bearer KEY."
            raise ApiError(401, message, "auth", code="invalid_api_key")
        return key


def _limited(receive: Receive, max_bytes: int) -> Receive:
    """Count the bytes received: Content-Length may be missing or wrong."""
    total = 0

    async def receive_some() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > max_bytes:
            raise HTTPException(413, _too_long(max_bytes))  # FastAPI would turn other exceptions into a 400
        return message

    return receive_some


def _too_long(max_bytes: int) -> str:
    return f"The body is longer than the {max_bytes} bytes that this server takes (--max-request-bytes)."


def may_connect(socket: WebSocket) -> bool:
    """Whether a WebSocket comes from a page of this server or of an origin in --allowed-origins.

    Browsers apply CORS to HTTP alone, so a WebSocket's origin is checked here.
    """
    origin = socket.headers.get("origin")
    allowed = state_of(socket).config.allowed_origins
    own = urlsplit(origin or "").netloc == socket.headers.get("host")
    return origin is None or own or origin in allowed or "*" in allowed
