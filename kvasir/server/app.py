"""The ASGI application: routes, error handlers, middleware."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from kvasir import __version__
from kvasir.errors import KvasirError
from kvasir.server.description import describe
from kvasir.server.errors import ApiError, as_api_error, error_response, not_found
from kvasir.server.gate import Gate
from kvasir.server.http import UNKNOWN_FIELDS, ClientGone, call_of, route_path
from kvasir.server.routes import (
    chat,
    completions,
    messages,
    models,
    operations,
    pages,
    pooling,
    responses,
    stored,
    tokens,
    websocket,
)
from kvasir.server.state import ServerState, state_of

ROUTERS = [chat.router, websocket.router, completions.router, responses.router, messages.router, models.router]
ROUTERS += [
    pooling.router,
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
_HANDLED = (ApiError, KvasirError, RequestValidationError, HTTPException, ClientGone, Exception)


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
    if isinstance(error, ClientGone):
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
        count=state.metrics.count_http,
        failed=state.metrics.failed,
        echo_ids=config.enable_request_id_headers,
        public=pages.PUBLIC,
        guards={path: lambda key: state.adapters.check_admin(key) for path in models.GUARDED},
        root_path=f"/{config.root_path.strip('/')}".rstrip("/"),
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
