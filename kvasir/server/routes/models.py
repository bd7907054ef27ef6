"""/v1/models: what is served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvasir.server.answers import answers, reply
from kvasir.server.schema.tokens import ModelCard, ModelList
from kvasir.server.state import ServerState, State

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(state: State) -> Response:
    return reply(ModelList(data=[_card(state, name) for name in state.model_names]))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard))
async def retrieve_model(model_id: str, state: State) -> Response:
    return reply(_card(state, state.check_model(model_id)))


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.engine.config.model
    return ModelCard(id=name, created=state.created, root=model.model, max_model_len=model.max_model_len)
