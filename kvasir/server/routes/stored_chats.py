"""Stored chat completions: list, retrieve, update, delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.server.errors import answers, not_found
from kvasir.server.http import StrictRoute, TheCall, reply
from kvasir.server.response_store import StoredCompletion
from kvasir.server.schema.base import DeletedReply
from kvasir.server.schema.chat import ChatCompletion
from kvasir.server.schema.stored import CompletionList, CompletionUpdate, StoredMessageList
from kvasir.server.state import ServerState, State

T = TypeVar("T")
router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

Limit = Annotated[int, Query(ge=1, le=100, description="Number of entries to return at most.")]
Order = Annotated[Literal["asc", "desc"], Query(description="The oldest first (asc), or the newest.")]
Cursor = Annotated[str | None, Query(description="Id of the entry after which the list begins.")]
Model = Annotated[str | None, Query(description="Only completions of this model.")]


@router.get("/v1/chat/completions", responses=answers(CompletionList))
async def list_completions(
    request: Request,
    state: State,
    call: TheCall,
    limit: Limit = 20,
    order: Order = "asc",
    after: Cursor = None,
    model: Model = None,
) -> Response:
    """Stored chat completions. `metadata[NAME]=VALUE` in the query selects those with this entry."""
    _check_stores(state)
    wanted = _metadata_of(request)
    found = [each.completion for each in state.completions.of(call.key)]
    found = [each for each in found if model in (None, each.model)]
    found = [each for each in found if wanted.items() <= (each.metadata or {}).items()]
    data, has_more = page(found, lambda each: each.id, limit, order, after)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return reply(CompletionList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.get("/v1/chat/completions/{completion_id}", responses=answers(ChatCompletion))
async def retrieve_completion(completion_id: str, state: State, call: TheCall) -> Response:
    return reply(_find(state, completion_id, call).completion)


@router.post("/v1/chat/completions/{completion_id}", responses=answers(ChatCompletion))
async def update_completion(completion_id: str, body: CompletionUpdate, state: State, call: TheCall) -> Response:
    """Replace the metadata of a stored completion."""
    found = _find(state, completion_id, call)
    found.completion.metadata = body.metadata
    state.completions.update(found)
    return reply(found.completion)


@router.delete("/v1/chat/completions/{completion_id}", responses=answers(DeletedReply))
async def delete_completion(completion_id: str, state: State, call: TheCall) -> Response:
    _find(state, completion_id, call)
    state.completions.delete(completion_id, call.key)
    return reply(DeletedReply(id=completion_id, object="chat.completion.deleted"))


@router.get("/v1/chat/completions/{completion_id}/messages", responses=answers(StoredMessageList))
async def list_messages(
    completion_id: str,
    state: State,
    call: TheCall,
    limit: Limit = 20,
    order: Order = "asc",
    after: Cursor = None,
) -> Response:
    """The messages of the request that a stored completion answers."""
    found = _find(state, completion_id, call)
    messages = [{**message, "id": f"{completion_id}-{place}"} for place, message in enumerate(found.messages)]
    data, has_more = page(messages, lambda message: str(message["id"]), limit, order, after)
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return reply(StoredMessageList(data=data, first_id=first, last_id=last, has_more=has_more))


def page(
    entries: Sequence[T], id_of: Callable[[T], str], limit: int, order: str, after: str | None
) -> tuple[list[T], bool]:
    """One page of a list that is given oldest first, and whether more follow."""
    found = list(entries) if order == "asc" else list(reversed(entries))
    if after is not None:
        place = next((place for place, entry in enumerate(found) if id_of(entry) == after), None)
        if place is None:
            raise RequestError(f"The list has no entry {after!r}.", "after")
        found = found[place + 1 :]
    return found[:limit], len(found) > limit


def _metadata_of(request: Request) -> dict[str, str]:
    wanted = {}
    for name, value in request.query_params.items():
        if name.startswith("metadata[") and name.endswith("]"):
            wanted[name[len("metadata[") : -1]] = value
        elif name not in ("limit", "order", "after", "model"):
            raise RequestError(f"{name} is unknown here; use limit, order, after, model or metadata[NAME].", name)
    return wanted


def _check_stores(state: ServerState) -> None:
    if not state.stores_responses:
        raise not_found(f"Chat completions are not stored: {state.why_nothing_is_stored}")


def _find(state: ServerState, completion_id: str, call: TheCall) -> StoredCompletion:
    _check_stores(state)
    return state.completions.find(completion_id, call.key)
