"""What the engine does, for people who watch: GET /engine/state once, WebSocket /engine/feed as it goes on.

The core makes a snapshot only when one of these asks (engine/snapshot.py). docs/engine_view.md describes the answer.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, WebSocket
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from kvasir.errors import KvasirError
from kvasir.server.engine_state import distributions, engine_state
from kvasir.server.errors import ApiError
from kvasir.server.origins import may_come_from
from kvasir.server.schema.base import encode
from kvasir.server.state import ServerState, State, state_of

router = APIRouter(tags=["operations"])

_POLICY_VIOLATION = 1008
_TRY_AGAIN = 1013
Engine = Annotated[int, Query(ge=0, description="which engine, where there are several (data_parallel_size)")]
Since = Annotated[int, Query(ge=0, description="leave out steps up to this number")]
Interval = Annotated[float, Query(ge=0.05, le=60, description="seconds between two messages")]


@router.get("/engine/state", summary="What the engine does at this moment")
async def engine_state_now(state: State, since: Since = 0, engine: Engine = 0) -> Response:
    return Response(encode(await _look(state, since, engine)), media_type="application/json")


@router.websocket("/engine/feed")
async def engine_feed(socket: WebSocket, interval: Interval = 0.25, engine: Engine = 0) -> None:
    """The state again and again; a message has only the steps that came since the one before."""
    if not may_come_from(socket):
        await socket.close(_POLICY_VIOLATION, "Pages of other origins may not watch: see --allowed-origins.")
        return
    await socket.accept()
    closed = asyncio.ensure_future(_until_closed(socket))
    try:
        await _tell(socket, closed, interval, engine)
    except (ApiError, KvasirError) as error:
        await socket.close(_TRY_AGAIN, str(error)[:120])
    except (WebSocketDisconnect, RuntimeError):
        pass  # it went away while we were sending
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
        raise ApiError(404, f"There is no engine {engine}: {number} run here.", "not_found", "engine")
    snapshot = await state.engine.call("snapshot", since, engine=engine)
    seen = engine_state(snapshot, state.model_names[0], distributions(state.metrics.collect()))
    return {**seen, "engine": engine, "engines": number}


async def _until_closed(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
