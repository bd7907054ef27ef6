"""What routes share in answering: strict JSON in, encoded structs out, and a watch on the client meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvasir import __version__
from kvasir.server import strict_json
from kvasir.server.errors import as_api_error, openai_body
from kvasir.server.schema.base import encode
from kvasir.server.sse import DONE, EventStream, event, unless_disconnected

T = TypeVar("T")
FINGERPRINT = f"kvasir-{__version__}"


class StrictRequest(Request):
    """Reads JSON strictly."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = strict_json.decode(await self.body(), "The body")
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
