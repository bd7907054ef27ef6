"""For operators: metrics, settings, the prefix cache."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from kvasir import __version__
from kvasir.server.answers import ERRORS, reply
from kvasir.server.engine_metrics import device_metrics, engine_metrics, info_metric
from kvasir.server.errors import ApiError
from kvasir.server.state import State

router = APIRouter(tags=["operations"])


@router.get("/metrics", summary="For Prometheus")
async def metrics(state: State) -> Response:
    further = engine_metrics(await state.engine_stats(), state.model_names[0])
    further += device_metrics(state.probe_device(), state.model_names[0])
    if (engine := state.engine_or_none) is not None:
        cache = {name: str(value) for name, value in asdict(engine.config.cache).items()}
        further.append(info_metric("cache_config_info", "Settings of the KV cache.", {**cache, "engine": "0"}))
    page = state.metrics.page(further, state.config.vllm_metric_names)
    return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/server_info", responses=ERRORS, summary="The settings in effect")
async def server_info(state: State) -> Response:
    engine = asdict(state.engine.config)
    engine["model"].pop("hf_token", None)
    server = asdict(state.config)
    server.pop("api_key", None)
    return reply({"version": __version__, "server": server, "engine": engine})


@router.post("/reset_prefix_cache", responses=ERRORS, summary="Forget cached prefixes")
async def reset_prefix_cache(state: State) -> Response:
    if not await state.engine.reset_prefix_cache():
        raise ApiError(409, "Requests are running: the prefix cache can be reset only when none is.", "conflict")
    return reply({"reset": True})
