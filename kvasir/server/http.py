"""HTTP as all routes share it: a call's id and key, bounded JSON in, encoded structs out, clients that disconnect."""

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
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope

from kvasir import __version__
from kvasir.errors import RequestError
from kvasir.server.api_keys import ANYBODY, ApiKey
from kvasir.server.body_limits import MAX_DEPTH, MAX_STRINGS, exceeded_limit, name_unknown_fields
from kvasir.server.large_bodies import off_loop
from kvasir.server.schema.base import Body, encode

T = TypeVar("T")
UNKNOWN_FIELDS = "X-Kvasir-Unknown-Fields"
FINGERPRINT = f"kvasir-{__version__}"

# ---------------------------------------------------------------- the call

_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII: it goes into logs and headers
GOOD_ID = "must be 1 to 128 printable ASCII characters without spaces."
_SCOPE_KEY = "kvasir.call"


@dataclass(slots=True)
class Call:
    """One HTTP request or WebSocket connection: its id, its API key, its arrival."""

    id: str
    path: str  # without --root-path
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


def route_path(scope: Scope) -> str:
    """Return the path without --root-path, whether or not a proxy has left the prefix in it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    under = root and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] or "/" if under else path


def call_of(connection: HTTPConnection) -> Call:
    """The call that the gate has attached."""
    found: Call = connection.scope[_SCOPE_KEY]
    return found


async def _call(connection: HTTPConnection) -> Call:
    return call_of(connection)  # a coroutine, because FastAPI runs plain functions in threads


TheCall = Annotated[Call, Depends(_call)]

# ---------------------------------------------------------------- JSON in

JSON_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError)  # raised for data that is not JSON
LARGE_BODY = 1 << 18  # bytes; a larger body is read in a thread


def decode_json(data: bytes | str, what: str, kind: type[Body] = Body) -> Any:
    """Decode standard JSON: no NaN, no bad UTF-8, no more than a body of this kind may have.

    Errors are a ValueError about `what`: the body, or the message."""
    try:
        raw = data.encode() if isinstance(data, str) else data
        if problem := too_much_json(raw, kind.max_values):
            raise ValueError(f"{what} {problem}")
        return msgspec.json.decode(raw)
    except JSON_ERRORS as error:
        raise ValueError(f"{what} is not valid JSON: {json_problem(error)}.") from error


async def read_json(data: bytes | str, what: str, kind: type[Body] = Body) -> Any:
    """Run `decode_json`, in a thread if the data is large."""
    if len(data) < LARGE_BODY:
        return decode_json(data, what, kind)
    return await off_loop(lambda: decode_json(data, what, kind))


def too_much_json(data: bytes, max_values: int) -> str | None:
    """A sentence without its subject if the data, whether or not it is JSON, exceeds a limit."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets <= MAX_DEPTH and data.count(b'"') <= 2 * MAX_STRINGS and data.count(b",") <= max_values:
        return None  # even with what stands in strings
    return exceeded_limit(data, max_values)


def json_problem(error: Exception) -> str:
    """What is wrong, without the terms of Python's codecs."""
    if isinstance(error, UnicodeError) or "utf-8" in str(error).lower():
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def without_unknown_fields(given: Any, kind: type[Body], policy: str, request_id: str) -> tuple[Any, tuple[str, ...]]:
    """Remove top-level fields that the body's type does not have, and return their names. Under `refuse` they stay:
    validation refuses them by name."""
    if policy == "refuse" or not isinstance(given, dict) or given.keys() <= kind.model_fields.keys():
        return given, ()
    names = name_unknown_fields([name for name in given if name not in kind.model_fields], request_id, policy == "warn")
    return {name: value for name, value in given.items() if name in kind.model_fields}, names


def _policy(request: Request) -> str:
    found: str = request.app.state.server.config.unknown_fields  # ServerState, which this file cannot import
    return found


class StrictRequest(Request):
    """A request whose JSON is decoded within limits, for a route whose body is of the type `kind`."""

    kind: type[Body] = Body
    unknown: tuple[str, ...] = ()  # fields that were removed from the body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            data = await self.body()
            try:
                self._json = await read_json(data, "The body", self.kind)
            except ValueError as error:
                # an HTTPException, because FastAPI hides other errors raised here
                raise HTTPException(400, str(error)) from error
            if self.kind is not Body:
                self._json = self.known_fields(self.kind)
        return self._json

    def known_fields(self, kind: type[Body]) -> Any:
        """Return the decoded body for a route that chooses its type, without fields that this type does not have."""
        kept, self.unknown = without_unknown_fields(self._json, kind, _policy(self), call_of(self).id)
        return kept


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if isinstance(kind, type) and issubclass(kind, Body):
                strict.kind = kind
            response = await handle(strict)
            if strict.unknown and _policy(request) == "warn":
                response.headers[UNKNOWN_FIELDS] = ", ".join(strict.unknown)
            return response

        return handle_strictly


Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], given: Any) -> Model:
    """Validate a body whose type a route chooses itself, with the errors of one that FastAPI validates."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


# ---------------------------------------------------------------- replies out


def reply(body: Any, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


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
