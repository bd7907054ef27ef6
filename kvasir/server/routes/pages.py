"""The playground, the engine view and the API page: static files from kvasir/server/pages.

A strict content security policy applies: they load nothing from other hosts and have no inline script or style.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.server.errors import not_found
from kvasir.server.state import State

FOLDER = Path(__file__).parent.parent / "pages"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidate every time
}
FILES = frozenset(file.name for file in FOLDER.iterdir() if file.suffix in _KINDS)
PUBLIC = frozenset({"/", "/engine", "/docs", *(f"/pages/{name}" for name in FILES)})  # nothing in them is secret

_METHODS = ["GET", "HEAD"]
_TO_DOCS = b'<a href="docs">API</a>'
router = APIRouter(include_in_schema=False)
docs_router = APIRouter(include_in_schema=False)  # left out by --disable-fastapi-docs


@router.api_route("/", methods=_METHODS)
async def playground(request: Request, state: State) -> Response:
    """The page of what the model does; while it is being loaded, that of a model that generates text."""
    engine = state.engine_or_none
    return _file("embed.html" if engine is not None and engine.config.model.poolers else "index.html", request)


@router.api_route("/engine", methods=_METHODS)
async def engine(request: Request) -> Response:
    return _file("engine.html", request)


@docs_router.api_route("/docs", methods=_METHODS)
async def docs(request: Request) -> Response:
    return _file("docs.html", request)


@router.api_route("/pages/{name}", methods=_METHODS)
async def page_file(name: str, request: Request) -> Response:
    if name not in FILES:
        raise not_found(f"There is no page file {name!r}.")
    return _file(name, request)


def _file(name: str, request: Request) -> Response:
    content, tag = _read(name, shows_docs=request.app.openapi_url is not None)
    headers = _HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_KINDS[Path(name).suffix])


@cache
def _read(name: str, shows_docs: bool) -> tuple[bytes, str]:
    content = (FOLDER / name).read_bytes()
    if not shows_docs:
        content = content.replace(_TO_DOCS, b"")
    return content, f'"{sha256(content).hexdigest()[:16]}"'
