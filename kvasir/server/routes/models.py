"""/v1/models: the served models, for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from kvasir.server.http import answers, reply
from kvasir.server.schema.tokens import MessagesModel, MessagesModelList, ModelCard, ModelList
from kvasir.server.state import ServerState, State

router = APIRouter(tags=["OpenAI"])

# Both interfaces use the same paths. Anthropic's clients always send this header.
Version = Annotated[str | None, Header(alias="anthropic-version")]


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(state: State, version: Version = None) -> Response:
    names = state.model_names
    if version is not None:
        data = [_messages_model(state, name) for name in names]
        return reply(MessagesModelList(data=data, first_id=names[0], last_id=names[-1]))
    return reply(ModelList(data=[_card(state, name) for name in names]))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard))
async def retrieve_model(model_id: str, state: State, version: Version = None) -> Response:
    name = state.check_model(model_id)
    return reply(_card(state, name) if version is None else _messages_model(state, name))


def _messages_model(state: ServerState, name: str) -> MessagesModel:
    created = datetime.fromtimestamp(state.created, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return MessagesModel(id=name, display_name=name, created_at=created)


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.engine.config.model
    return ModelCard(id=name, created=state.created, root=model.model, max_model_len=model.max_model_len)
