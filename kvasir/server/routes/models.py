"""The served models (/v1/models), for OpenAI's and Anthropic's clients, and their adapters under vLLM's names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Header
from pydantic import Field
from starlette.responses import Response

from kvasir.lora.host import Adapter
from kvasir.server.errors import ERRORS, answers
from kvasir.server.http import StrictRoute, reply
from kvasir.server.schema.base import Body, Reply, example
from kvasir.server.state import ServerState, State


class LoadAdapterRequest(Body):
    """An adapter to serve: a PEFT directory on the server's machine, or a name on the Hugging Face Hub."""

    model_config = example(lora_name="my-adapter", lora_path="/adapters/my-adapter")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)
    task_id: int | None = None  # of a multitask prompt
    load_inplace: bool | None = None  # replace an adapter of this name


class UnloadAdapterRequest(Body):
    model_config = example(lora_name="my-adapter")

    lora_name: str


class ModelCard(Reply, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvasir"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Reply, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class MessagesModel(Reply, kw_only=True):
    """A model as Anthropic's clients read it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # ISO 8601


class MessagesModelList(Reply, kw_only=True):
    data: list[MessagesModel]
    has_more: bool = False
    first_id: str
    last_id: str


router = APIRouter(tags=["OpenAI"])

# Both interfaces use the same paths. Anthropic's clients always send this header.
Version = Annotated[str | None, Header(alias="anthropic-version")]


@router.get("/v1/models", responses=answers(ModelList, MessagesModelList))
async def list_models(state: State, version: Version = None) -> Response:
    names = [*state.model_names, *(adapter.name for adapter in state.adapters.all())]
    if version is not None:
        data = [_messages_model(state, name) for name in names]
        return reply(MessagesModelList(data=data, first_id=names[0], last_id=names[-1]))
    return reply(ModelList(data=[_card(state, name) for name in names]))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard, MessagesModel))
async def retrieve_model(model_id: str, state: State, version: Version = None) -> Response:
    name = state.check_model(model_id, None)
    return reply(_card(state, name) if version is None else _messages_model(state, name))


def _messages_model(state: ServerState, name: str) -> MessagesModel:
    created = datetime.fromtimestamp(state.created, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return MessagesModel(id=name, display_name=name, created_at=created)


def adapter_card(state: ServerState, adapter: Adapter) -> ModelCard:
    """An adapter, with the model that it adapts as its parent."""
    longest = state.engine.config.model.max_model_len - adapter.num_virtual_tokens
    parent = state.model_names[0]
    return ModelCard(id=adapter.name, created=state.created, root=adapter.path, parent=parent, max_model_len=longest)


def _card(state: ServerState, name: str) -> ModelCard:
    model = state.engine.config.model
    if (adapter := state.adapters.get(name)) is not None:
        return adapter_card(state, adapter)
    return ModelCard(id=name, created=state.created, root=model.model, max_model_len=model.max_model_len)


adapter_router = APIRouter(route_class=StrictRoute, tags=["Adapters"])
# These need --lora-admin-key in place of an API key; the gate asks for it before a body is read.
GUARDED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@adapter_router.post(GUARDED[0], responses=answers(ModelCard), summary="Serve an adapter under a name")
async def load_lora_adapter(body: LoadAdapterRequest, state: State) -> Response:
    _ = state.engine  # a 503 while there is none
    replace = bool(body.load_inplace)
    adapter = await state.adapters.load(body.lora_name, body.lora_path, body.task_id, replace)
    return reply(adapter_card(state, adapter))


@adapter_router.post(GUARDED[1], responses=ERRORS, summary="Serve an adapter no longer")
async def unload_lora_adapter(body: UnloadAdapterRequest, state: State) -> Response:
    state.adapters.unload(body.lora_name)
    return reply({"unloaded": body.lora_name})
