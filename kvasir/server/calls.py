"""One HTTP request or WebSocket connection as the server sees it: its id, whose it is, when it came."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.types import Scope

from kvasir.server.keys import ANYBODY, Key

_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII: it goes into logs and headers
GOOD_ID = "must be 1 to 128 printable ASCII characters without spaces."
_PLACE = "kvasir.call"


@dataclass(slots=True)
class Call:
    id: str
    path: str
    key: Key = ANYBODY
    arrived: float = field(default_factory=time.time)
    traceparent: str | None = None

    @property
    def log_name(self) -> str:
        return self.key.name or "-"


def new_id() -> str:
    return uuid.uuid4().hex


def is_good_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def attach(scope: Scope, call: Call) -> None:
    scope[_PLACE] = call


def call_of(connection: HTTPConnection) -> Call:
    """What the gate has put there."""
    found: Call = connection.scope[_PLACE]
    return found


async def _call(connection: HTTPConnection) -> Call:
    return call_of(connection)  # a coroutine, because FastAPI runs plain functions in threads


TheCall = Annotated[Call, Depends(_call)]
