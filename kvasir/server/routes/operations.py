"""For operators: metrics, settings, the prefix cache, and the probes of orchestrators."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from kvasir import __version__
from kvasir.errors import EngineError
from kvasir.server.engine_metrics import cache_metric, device_metrics, engine_metrics
from kvasir.server.errors import ERRORS, ApiError
from kvasir.server.http import reply
from kvasir.server.state import FAILED, ServerState, State

router = APIRouter(tags=["operations"])


@router.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus' text format")
async def metrics(state: State) -> Response:
    stats = await state.engine_stats()
    further = engine_metrics(stats, state.model_names[0])
    further += device_metrics(state.probe_device(), state.model_names[0])
    if (engine := state.engine_or_none) is not None and stats:
        further.append(cache_metric(engine.config, stats))
    page = state.metrics.page(further, state.config.vllm_metric_names)
    return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/server_info", responses=ERRORS, summary="The settings in effect")
async def server_info(state: State) -> Response:
    engine = asdict(state.engine.config)
    engine["model"].pop("hf_token", None)
    server = asdict(state.config)
    server.pop("api_key", None)
    return reply({"version": __version__, "server": server, "engine": engine})


@router.post("/reset_prefix_cache", responses=ERRORS, summary="Empty the prefix cache")
async def reset_prefix_cache(state: State) -> Response:
    if not all(await state.call_all("reset_prefix_cache")):
        raise ApiError(409, "The prefix cache can be reset only while no request runs: try again later.", "conflict")
    return reply({"reset": True})


# ---------------------------------------------------------------- probes

_DOWN: dict[int | str, dict[str, Any]] = {
    503: {"description": "Not so: `reason` says why.", "content": {"application/json": {"schema": {"type": "object"}}}}
}


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=_DOWN, summary="200 unless the engine has died, or has been stuck for long")
async def health(state: State) -> Response:
    problem, status = _death(state), "dead"
    if problem is None and (engine := state.engine_or_none) is not None and state.phase.is_ready:
        try:
            engine.check_stall(state.config.health_stall_timeout, "health_stall_timeout")
        except EngineError as error:
            problem, status = str(error), "stalled"
    return reply({"status": "ok" if problem is None else status, "reason": problem}, 200 if problem is None else 503)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", responses=_DOWN, summary="The same as /health")
@router.post("/ping", responses=_DOWN, summary="The same as /health")
async def ping(state: State) -> Response:
    return await health(state)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=_DOWN, summary="200 when requests are answered; else 503 with the phase and the reason")
async def ready(state: State) -> Response:
    """Ready: the model is loaded, the server does not drain, the engine makes progress."""
    body: dict[str, Any] = {
        "status": state.phase.now,
        "reason": _death(state),
        "startup_seconds": state.phase.seconds,
    }
    if state.phase.is_ready and body["reason"] is None:
        try:
            await state.engine.check_health()
        except EngineError as error:
            body |= {"status": "stalled", "reason": str(error)}
        peers = state.peers
        if peers is not None and (count := peers.num_ready()) < peers.number:
            body |= {"status": "waiting", "reason": f"{count} of {peers.number} API processes are ready"}
    return reply(body, 200 if body["status"] == "ready" and body["reason"] is None else 503)


@router.get("/version")
async def version() -> Response:
    return reply({"version": __version__})


@router.get("/load", summary="How many requests this process has in flight, and the engine's queue")
async def load(state: State) -> Response:
    stats = await state.stats()
    return reply(
        {
            "server_load": len(state.requests),
            "running": None if stats is None else stats.num_running,
            "waiting": None if stats is None else stats.num_waiting,
        }
    )


def _death(state: ServerState) -> str | None:
    engine = state.engine_or_none
    if engine is not None and engine.errored:
        return str(engine.dead_error)
    return state.phase.reason if state.phase.now == FAILED else None
