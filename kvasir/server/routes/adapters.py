"""/v1/load_lora_adapter and /v1/unload_lora_adapter, under vLLM's names, guarded by a key of their own."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvasir.server.errors import ERRORS, answers
from kvasir.server.http import StrictRoute, reply
from kvasir.server.routes.models import adapter_card
from kvasir.server.schema.tokens import LoadAdapterRequest, ModelCard, UnloadAdapterRequest
from kvasir.server.state import State

router = APIRouter(route_class=StrictRoute, tags=["Adapters"])
# These need --lora-admin-key in place of an API key; the gate asks for it before a body is read.
GUARDED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@router.post(GUARDED[0], responses=answers(ModelCard), summary="Serve an adapter under a name")
async def load_lora_adapter(body: LoadAdapterRequest, state: State) -> Response:
    _ = state.engine  # a 503 while there is none
    replace = bool(body.load_inplace)
    adapter = await state.adapters.load(body.lora_name, body.lora_path, body.task_id, replace)
    return reply(adapter_card(state, adapter))


@router.post(GUARDED[1], responses=ERRORS, summary="Serve an adapter no longer")
async def unload_lora_adapter(body: UnloadAdapterRequest, state: State) -> Response:
    state.adapters.unload(body.lora_name)
    return reply({"unloaded": body.lora_name})
