"""Browsers let any page open a WebSocket to anywhere, and say which page: the rules of CORS are ours to keep."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import WebSocket

from kvasir.server.state import state_of


def may_come_from(socket: WebSocket) -> bool:
    """Whether the page that asks is one of this server, or of an origin that --allowed-origins names."""
    origin = socket.headers.get("origin")
    allowed = state_of(socket).config.allowed_origins
    own = urlsplit(origin or "").netloc == socket.headers.get("host")
    return origin is None or own or origin in allowed or "*" in allowed
