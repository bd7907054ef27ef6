"""One HTTP request or WebSocket connection as the server sees it: its id, whose it is, when it came."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from kvasir import __version__
from kvasir.server.api_keys import ANYBODY, Key
from kvasir.server.errors import as_api_error, openai_body
from kvasir.server.event_stream import DONE, EventStream, event, unless_disconnected
from kvasir.server.schema.base import encode

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


# ----------------------------------------------------------------
# What routes share in answering: strict JSON in, encoded structs out, and a watch on the client meanwhile.

T = TypeVar("T")
FINGERPRINT = f"kvasir-{__version__}"


class StrictRequest(Request):
    """Reads JSON strictly."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = decode_json(await self.body(), "The body")
            except ValueError as error:
                # an HTTPException, because FastAPI hides what else is raised here
                raise HTTPException(400, str(error)) from error
        return self._json


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def reply(body: Any, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; it is cancelled, and what it runs aborted, if the client goes away."""
    async with unless_disconnected(request.receive):
        return await work


async def stream(request: Request, payloads: AsyncGenerator[list[bytes], None]) -> Response:
    """OpenAI's way: one event for each JSON object, then [DONE]."""
    return await EventStream(_events(payloads), error_event).prime(request.receive)


def error_event(error: Exception) -> bytes:
    return event(encode(openai_body(as_api_error(error)))) + DONE


async def _events(payloads: AsyncGenerator[list[bytes], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for some in payloads:
            yield event(some[0]) if len(some) == 1 else b"".join(map(event, some))
        yield DONE
    finally:
        await payloads.aclose()


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
    }
    for code, text in {
        400: "A parameter is wrong, unknown or not available; `param` names it.",
        401: "No key, or a wrong one.",
        404: "No such model or object.",
        413: "The body or the prompt is too long.",
        429: "Too much is queued, or the key's limit is reached: see Retry-After.",
        500: "The request failed inside the server.",
        503: "The engine starts, drains or has died.",
        504: "The request ran out of time.",
    }.items()
}


def answers(kind: type[Any], description: str = "The answer.") -> dict[int | str, dict[str, Any]]:
    """For a route's documentation: what it answers."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}, **ERRORS}


# ----------------------------------------------------------------
# JSON as the standard has it: no NaN, no bad UTF-8, no nesting that exhausts the stack.

JSON_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeError)  # of whatever is no JSON


def decode_json(data: bytes | str, what: str) -> Any:
    """A ValueError with one sentence for whatever is wrong. `what`: the body, or the message."""
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS as error:
        raise ValueError(f"{what} is not valid JSON: {json_problem(error)}.") from error


def json_problem(error: Exception) -> str:
    """What is wrong, without a codec's own words."""
    if isinstance(error, UnicodeError) or "utf-8" in str(error).lower():
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
