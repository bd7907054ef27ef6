"""What is said of a path that nobody serves, and of a method that a path does not have."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from kvasir.server.errors import ApiError, not_found


def no_route(request: Request, status: int, routes: Iterable[BaseRoute], shows_docs: bool) -> ApiError:
    path, more = request.scope["path"], "; /docs lists all." if shows_docs else "."
    methods = _methods(request, routes)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and methods:
        message = f"{request.method} is not a method of {path}, which takes {' and '.join(methods)}{more}"
        return ApiError(status, message, "invalid_request", allow=methods)
    return not_found(f"Nothing is served at {path}{more}")


def _methods(request: Request, routes: Iterable[BaseRoute]) -> tuple[str, ...]:
    """Those of every route at this path: Starlette tells those of the first one that it comes upon."""
    found: set[str] = set()
    for route in routes:
        if route.matches(request.scope)[0] != Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return tuple(sorted(found))
