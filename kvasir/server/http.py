"""HTTP as all routes share it: a call's id and key, strict JSON in, encoded structs out, clients that disconnect."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope

from kvasir import __version__
from kvasir.errors import RequestError
from kvasir.server.api_keys import ANYBODY, ApiKey
from kvasir.server.schema.base import encode

T = TypeVar("T")
FINGERPRINT = f"kvasir-{__version__}"

# ---------------------------------------------------------------- the call

_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII: it goes into logs and headers
GOOD_ID = "must be 1 to 128 printable ASCII characters without spaces."
_SCOPE_KEY = "kvasir.call"


@dataclass(slots=True)
class Call:
    """One HTTP request or WebSocket connection: its id, its API key, its arrival."""

    id: str
    path: str
    key: ApiKey = ANYBODY
    arrived: float = field(default_factory=time.time)
    traceparent: str | None = None

    @property
    def log_name(self) -> str:
        return self.key.name or "-"

    def take_id(self, request_id: str | None) -> None:
        """Use the id that a body gives its request in the reply, the header and the log."""
        if request_id is None:
            return
        if not is_good_id(request_id):
            raise RequestError(f"request_id {GOOD_ID}", "request_id")
        self.id = request_id


def new_id() -> str:
    return uuid.uuid4().hex


def is_good_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def attach(scope: Scope, call: Call) -> None:
    scope[_SCOPE_KEY] = call


def call_of(connection: HTTPConnection) -> Call:
    """The call that the gate has attached."""
    found: Call = connection.scope[_SCOPE_KEY]
    return found


async def _call(connection: HTTPConnection) -> Call:
    return call_of(connection)  # a coroutine, because FastAPI runs plain functions in threads


TheCall = Annotated[Call, Depends(_call)]

# ---------------------------------------------------------------- JSON in

JSON_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError)  # raised for data that is not JSON


def decode_json(data: bytes | str, what: str) -> Any:
    """Decode standard JSON: no NaN, no bad UTF-8. Errors are a ValueError about `what`: the body, or the message."""
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS as error:
        raise ValueError(f"{what} is not valid JSON: {json_problem(error)}.") from error


def json_problem(error: Exception) -> str:
    """What is wrong, without the terms of Python's codecs."""
    if isinstance(error, UnicodeError) or "utf-8" in str(error).lower():
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


class StrictRequest(Request):
    """A request whose JSON is decoded strictly."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = decode_json(await self.body(), "The body")
            except ValueError as error:
                # an HTTPException, because FastAPI hides other errors raised here
                raise HTTPException(400, str(error)) from error
        return self._json


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


# ---------------------------------------------------------------- replies out


def reply(body: Any, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
    }
    for code, text in {
        400: "A parameter is wrong, unknown or not available; `param` names it.",
        401: "The API key is missing or wrong.",
        404: "The model or object does not exist.",
        413: "The body or the prompt is too long.",
        429: "The queue is full, or the key's limit is reached: see Retry-After.",
        500: "The request failed inside the server.",
        503: "The engine is starting or draining, or has died.",
        504: "The request ran out of time.",
    }.items()
}


def answers(kind: type[Any], description: str = "The answer.") -> dict[int | str, dict[str, Any]]:
    """The replies of a route, for the documentation."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}, **ERRORS}


# ---------------------------------------------------------------- clients that disconnect


class ClientGone(Exception):
    """The client has disconnected."""


@asynccontextmanager
async def unless_disconnected(receive: Receive) -> AsyncIterator[None]:
    """Cancel this block when the client disconnects, and raise ClientGone. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"
    watcher = asyncio.create_task(_until_disconnected(receive))
    watcher.add_done_callback(lambda done: None if done.cancelled() else task.cancel("client gone"))
    try:
        yield
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled() or task.uncancel() > 0:
            raise  # the cancellation came from elsewhere
        raise ClientGone from None
    finally:
        watcher.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client disconnects."""
    async with unless_disconnected(request.receive):
        return await work
