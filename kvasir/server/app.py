"""The ASGI application: routes, error handlers, middleware, and its description (/openapi.json).

The description is what FastAPI writes, made exact. Bodies take more than their types say: pydantic converts values
("true" is true, 2.0 is 2), as clients of vLLM expect, and unknown top-level fields are removed unless --unknown-fields
is refuse. The description says so, so that whatever does not fit it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from kvasir import __version__
from kvasir.errors import KvasirError
from kvasir.server.errors import ApiError, as_api_error, error_response, not_found
from kvasir.server.gate import Gate
from kvasir.server.http import UNKNOWN_FIELDS, ClientGone, call_of, route_path
from kvasir.server.routes import (
    chat,
    completions,
    messages,
    models,
    operations,
    other_embeddings,
    pages,
    pooling,
    responses,
    stored,
    tokens,
    websocket,
)
from kvasir.server.schema.base import Reply
from kvasir.server.state import ServerState, state_of

ROUTERS = [chat.router, websocket.router, completions.router, responses.router, messages.router, models.router]
ROUTERS += [
    pooling.router,
    other_embeddings.router,
    stored.router,
    tokens.router,
    operations.router,
    pages.router,
    pages.feed_router,
    models.adapter_router,
]
_ABOUT = (
    "OpenAI's and Anthropic's interfaces to a language model, and those of embedding models and rerankers. "
    "/v1/chat/completions also takes a WebSocket; the WebSocket /engine/feed sends the content of /engine/state "
    "again and again. Booleans and numbers in bodies may also be written as strings."
)
_NO_ROUTE = (404, 405)
_HANDLED = (ApiError, KvasirError, RequestValidationError, HTTPException, ClientGone, ClientDisconnect)
# The gate answers others.


def make_app(state: ServerState) -> FastAPI:
    shown = None if state.config.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(
        title="Kvasir",
        version=__version__,
        description=_ABOUT,
        openapi_url=shown,
        docs_url=None,  # pages.py has our own, which loads nothing from other hosts
        redoc_url=None,
    )
    app.state.server = state
    for router in [*ROUTERS, *([pages.docs_router] if shown else [])]:
        app.include_router(router)
    for kind in _HANDLED:
        app.add_exception_handler(kind, _answer_error)
    _add_layers(app, state)
    describe(app, state.config.unknown_fields)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone | ClientDisconnect):  # the second one while its body is read
        return Response(status_code=499)  # the client has disconnected
    call = call_of(request)
    if isinstance(error, HTTPException) and error.status_code in _NO_ROUTE:
        routers = [*ROUTERS, pages.docs_router]
        routes = [*request.app.routes, *(route for router in routers for route in router.routes)]
        error = no_route(request, error.status_code, routes, request.app.openapi_url is not None)
    found = as_api_error(error)
    if not found.counted:
        state_of(request).metrics.failed(found.cause)
    return error_response(found, call.path, call.id)


def _add_layers(app: FastAPI, state: ServerState) -> None:
    """Add middleware; the last one added is the outermost."""
    config = state.config
    app.add_middleware(
        Gate,
        keys=state.keys,
        max_bytes=config.max_request_bytes,
        memory=state.body_memory,
        replies=state.reply_memory,
        count=state.metrics.count_http,
        failed=state.metrics.failed,
        echo_ids=config.enable_request_id_headers,
        public=pages.PUBLIC,
        guards={path: lambda key: state.adapters.check_admin(key) for path in models.GUARDED},
        root_path=config.path_prefix,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", UNKNOWN_FIELDS],
        )


# ---------------------------------------------------------------- unknown paths and methods


def no_route(request: Request, status: int, routes: Iterable[BaseRoute], shows_docs: bool) -> ApiError:
    path, more = route_path(request.scope), "; /docs lists all." if shows_docs else "."
    methods = _methods(request, routes)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and methods:
        message = f"{path} does not take {request.method}, only {' and '.join(methods)}{more}"
        return ApiError(status, message, "invalid_request", allow=methods)
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"  # a base URL with or without it
    if any(getattr(route, "path", None) == meant for route in routes):
        return not_found(f"Nothing is served at {path}. Did you mean {meant}?")
    return not_found(f"Nothing is served at {path}{more}")


def _methods(request: Request, routes: Iterable[BaseRoute]) -> tuple[str, ...]:
    """Methods of all routes at this path: Starlette reports those of the first route that it finds.

    A path that routes name as it is, such as /v1/responses/input_tokens, is no id of another route's.
    """
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    named = [route for route in matching if getattr(route, "path", None) == route_path(request.scope)]
    found: set[str] = set()
    for route in named or matching:
        found |= getattr(route, "methods", None) or set()
    return tuple(sorted(found))


# ---------------------------------------------------------------- the description

_REFERENCE = "#/components/schemas/{name}"
_SPACE = r"[\s\u0085]*"
BOOLEAN_TEXT = (
    "^(0|1|[tT]|[fF]|[yY]|[nN]|[oO][nN]|[nN][oO]|[oO][fF][fF]|[yY][eE][sS]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE])$"
)
# pydantic drops leading zeros with what follows them: "0_1" and even "0-1" are integers
INTEGER_TEXT = rf"^{_SPACE}[+-]?(0[0_]*-?_?)?[0-9]+(_[0-9]+)*(\.0+)?{_SPACE}$"
_POINT = r"[0-9](_?[0-9])*(_?\.(_?[0-9])*)?|\.(_?[0-9])+"
NUMBER_TEXT = rf"^{_SPACE}([+-]_?)?({_POINT})(_?[eE](_?[+-])?(_?[0-9])+)?{_SPACE}$"
IS_CONVERSION = "x-conversion"  # /docs leaves these out of a field's type
_CONVERSIONS: dict[str, dict[str, Any]] = {
    "boolean": {
        "title": "ConvertedBoolean",
        "description": "0 or 1, or true, false, yes, no, on, off, t, f, y, n, 0 or 1 as a string.",
        "anyOf": [{"enum": [0, 1]}, {"type": "string", "pattern": BOOLEAN_TEXT}],
    },
    "integer": {
        "title": "ConvertedInteger",
        "description": "An integer as a string, or a boolean, which is 0 or 1.",
        "anyOf": [{"type": "string", "pattern": INTEGER_TEXT}, {"type": "boolean"}],
    },
    "number": {
        "title": "ConvertedNumber",
        "description": "A number as a string, or a boolean, which is 0 or 1.",
        "anyOf": [{"type": "string", "pattern": NUMBER_TEXT}, {"type": "boolean"}],
    },
}
_VALUES = ("default", "examples", "enum")  # keys of a schema whose content is no schema
_BESIDE = ("title", "description", "default", "examples")  # what stays beside a field's alternatives


def describe(app: FastAPI, unknown_fields: str) -> None:
    """Complete the application's description when it is first asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = plain()
            _describe_bodies(spec, unknown_fields)
            _describe_replies(spec)
            _drop_default_errors(spec)
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_bodies(spec: dict[str, Any], unknown_fields: str) -> None:
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in schemas.items():  # of pydantic's models: replies are none
        schemas[name] = with_conversions(schema)
    schemas.update({each["title"]: {**each, IS_CONVERSION: True} for each in _CONVERSIONS.values()})
    if unknown_fields == "refuse":
        return
    for path in spec["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name:
                schemas[name]["additionalProperties"] = True


def with_conversions(schema: Any) -> Any:
    """The schema with what is converted to its booleans and numbers, at every depth."""
    if isinstance(schema, list):
        return [with_conversions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: each if key in _VALUES else with_conversions(each) for key, each in schema.items()}
    if isinstance(fields := schema.get("properties"), dict):
        made["properties"] = {name: with_conversions(field) for name, field in fields.items()}
    conversion = _CONVERSIONS.get(schema["type"]) if isinstance(schema.get("type"), str) else None
    if conversion is None:
        return made
    strict = {key: each for key, each in made.items() if key not in _BESIDE}
    alternatives = [strict, {"$ref": _REFERENCE.format(name=conversion["title"])}]
    return {"anyOf": alternatives, **{key: made[key] for key in _BESIDE if key in made}}


def _describe_replies(spec: dict[str, Any]) -> None:
    """FastAPI knows pydantic's models only, and replies are structs."""
    _, replies = msgspec.json.schema_components(_all_replies(), ref_template=_REFERENCE)
    for name, reply in replies.items():
        spec["components"]["schemas"].setdefault(name, reply)


def _all_replies() -> list[type[Reply]]:
    found, todo = [], [Reply]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        found += [] if kind is Reply else [kind]
    return found


def _drop_default_errors(spec: dict[str, Any]) -> None:
    """Remove FastAPI's 422: this server never sends it."""
    for path in spec.get("paths", {}).values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        spec["components"]["schemas"].pop(name, None)
