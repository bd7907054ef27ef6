"""The web pages: the playground, the engine view with the state that it shows, and the API page.

The pages are static files from kvasir/server/pages. A strict content security policy applies: they load nothing from
other hosts and have no inline script or style. The state of the engine comes from GET /engine/state once, and from the
WebSocket /engine/feed again and again. The core makes a snapshot only when one of these asks (engine/snapshot.py).
docs/engine_view.md describes the JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, WebSocket
from prometheus_client.core import Metric
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from kvasir.engine.stats import RequestSnapshot, Snapshot
from kvasir.engine.transport import KEYS_PER_CLIENT
from kvasir.errors import KvasirError
from kvasir.frontend.requests.metrics import PREFIX
from kvasir.messages import Int32Array
from kvasir.server.errors import ERRORS, ApiError, not_found
from kvasir.server.gate import may_connect
from kvasir.server.schema.base import encode
from kvasir.server.state import ServerState, State, state_of

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
    """Serve the playground of the model's task; while the model is being loaded, that of text generation."""
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


feed_router = APIRouter(tags=["operations"])

_POLICY_VIOLATION = 1008
_TRY_AGAIN = 1013
_MAX_PAUSE = 1.0  # seconds
Engine = Annotated[int, Query(ge=0, description="which engine, where there are several (data_parallel_size)")]
Since = Annotated[int, Query(ge=0, description="leave out steps up to this number")]
Interval = Annotated[float, Query(ge=0.05, le=60, description="seconds between two messages")]


@feed_router.get("/engine/state", responses=ERRORS, summary="The engine's requests, blocks and steps at this moment")
async def engine_state_now(state: State, since: Since = 0, engine: Engine = 0) -> Response:
    return Response(encode(await _look(state, since, engine)), media_type="application/json")


@feed_router.websocket("/engine/feed")
async def engine_feed(socket: WebSocket, interval: Interval = 0.25, engine: Engine = 0) -> None:
    """Send the state again and again; each message has only the steps since the one before."""
    if not may_connect(socket):
        await socket.close(_POLICY_VIOLATION, "This page's origin is not allowed: see --allowed-origins.")
        return
    await socket.accept()
    closed = asyncio.ensure_future(_until_closed(socket))
    try:
        await _tell(socket, closed, interval, engine)
    except (ApiError, KvasirError) as error:
        await socket.close(_TRY_AGAIN, str(error)[:120])
    except (WebSocketDisconnect, RuntimeError):
        pass  # it disconnected while a message was being sent
    finally:
        closed.cancel()


async def _tell(socket: WebSocket, closed: asyncio.Future[None], interval: float, engine: int) -> None:
    state, since = state_of(socket), 0
    while not closed.done():
        seen = await _look(state, since, engine)
        since = seen["steps"][-1]["step"] if seen["steps"] else since
        await socket.send_text(encode(seen).decode())
        await asyncio.wait([closed], timeout=interval)


async def _look(state: ServerState, since: int, engine: int) -> dict[str, Any]:
    number = state.engine.config.parallel.data_parallel_size
    if engine >= number:
        raise ApiError(
            404,
            f"Engine {engine} does not exist: {number} run here, from 0 on.",
            "not_found",
            "engine",
        )
    state.num_lookers += 1
    try:
        async with state.look_lock:
            began = time.monotonic()
            snapshot = await state.call("snapshot", since, engine=engine)
            seen = engine_state(snapshot, state.model_names[0], distributions(state.metrics.collect()))
            if state.num_lookers > 1:  # requests get their turn: the pause is three times as long as this look
                await asyncio.sleep(min(_MAX_PAUSE, 3 * (time.monotonic() - began)))
    finally:
        state.num_lookers -= 1
    return {**seen, "engine": engine, "engines": number}


async def _until_closed(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


# ---------------------------------------------------------------- a snapshot as JSON

# Names in the JSON, and the histograms they are read from.
LATENCIES = {"ttft": PREFIX + "time_to_first_token_seconds", "itl": PREFIX + "inter_token_latency_seconds"}

BlockRange = tuple[int, int]  # first block, number of blocks


def engine_state(snapshot: Snapshot, model: str, latency: dict[str, Any]) -> dict[str, Any]:
    ends = np.cumsum(snapshot.num_held)
    tables = np.split(snapshot.held, ends[:-1]) if len(ends) else []
    running = [
        _request(picture, "running", block_ranges(table))
        for picture, table in zip(snapshot.running, tables, strict=True)
    ]
    return {
        "time": snapshot.time,
        "model": model,
        "blocks": {
            "total": snapshot.stats.num_blocks,
            "used": snapshot.stats.num_used_blocks,
            "cached": snapshot.stats.num_cached_blocks,
            "size": snapshot.block_size,
            "bytes": snapshot.block_bytes,
            "cached_runs": block_ranges(np.sort(snapshot.cached)),
        },
        "requests": [*running, *(_request(picture, "waiting", []) for picture in snapshot.waiting)],
        "steps": [asdict(step) for step in snapshot.steps],
        "totals": asdict(snapshot.stats),
        "memory": asdict(snapshot.memory),
        "latency": latency,
    }


def _request(picture: RequestSnapshot, state: str, blocks: list[BlockRange]) -> dict[str, Any]:
    return {
        "key": picture.key,
        "id": request_name(picture.key),
        "state": state,
        "prompt_tokens": picture.num_prompt,
        "computed_tokens": picture.num_computed,
        "output_tokens": picture.num_output,
        "max_tokens": picture.max_output,
        "cached_tokens": picture.num_cached,
        "preemptions": picture.num_preemptions,
        "age": picture.waited,
        "blocks": blocks,
    }


def request_name(key: int) -> str:
    """Return a short name. Clients' own ids may be secret, and one of them may stand for several requests of the
    engine."""
    client, number = divmod(key, 1 << KEYS_PER_CLIENT)
    return f"request {number}" if client == 0 else f"request {client}.{number}"


def block_ranges(blocks: Int32Array) -> list[BlockRange]:
    """Return blocks, in order, as ranges of consecutive ones: [4, 5, 6, 9] -> [(4, 3), (9, 1)]."""
    if not len(blocks):
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    counts = np.diff(starts, append=len(blocks))
    return list(zip(blocks[starts].tolist(), counts.tolist(), strict=True))


def distributions(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return the histograms of LATENCIES: upper bounds in seconds, and counts; the last count has no bound."""
    found: dict[str, Any] = {name: {"bounds": [], "counts": []} for name in LATENCIES}
    for metric in metrics:
        for name, family in LATENCIES.items():
            if metric.name == family:
                found[name] = _distribution(metric)
    return found


def _distribution(metric: Metric) -> dict[str, Any]:
    below: dict[float, float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            below[bound] = below.get(bound, 0) + sample.value
    bounds = sorted(below)
    counts = np.diff([below[bound] for bound in bounds], prepend=0).astype(int).tolist()
    return {"bounds": [bound for bound in bounds if bound != float("inf")], "counts": counts}
