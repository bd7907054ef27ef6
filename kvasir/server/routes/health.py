"""Probes: is the process alive, is it ready, what does it carry."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvasir import __version__
from kvasir.errors import EngineError
from kvasir.server.answers import reply
from kvasir.server.phases import FAILED
from kvasir.server.state import ServerState, State

router = APIRouter(tags=["operations"])


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="200 unless the engine has died")
async def health(state: State) -> Response:
    problem = _death(state)
    return reply({"status": "ok" if problem is None else "dead", "reason": problem}, 200 if problem is None else 503)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", summary="The same as /health")
@router.post("/ping", include_in_schema=False)
async def ping(state: State) -> Response:
    return await health(state)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="200 when requests are answered; else 503 with the phase and the reason")
async def ready(state: State) -> Response:
    """Loaded, not draining, and the engine makes progress."""
    body: dict[str, Any] = {
        "status": state.phases.now,
        "reason": _death(state),
        "startup_seconds": state.phases.seconds,
    }
    if state.phases.is_ready and body["reason"] is None:
        try:
            await state.engine.check_health()
        except EngineError as error:
            body |= {"status": "stalled", "reason": str(error)}
    return reply(body, 200 if body["status"] == "ready" and body["reason"] is None else 503)


@router.get("/version")
async def version() -> Response:
    return reply({"version": __version__})


@router.get("/load", summary="How many requests this process has in flight, and the engine's queue")
async def load(state: State) -> Response:
    stats = await state.stats()
    return reply(
        {
            "server_load": len(state.runs),
            "running": None if stats is None else stats.num_running,
            "waiting": None if stats is None else stats.num_waiting,
        }
    )


def _death(state: ServerState) -> str | None:
    engine = state.engine_or_none
    if engine is not None and engine.errored:
        return str(engine.dead_error)
    return state.phases.reason if state.phases.now == FAILED else None
