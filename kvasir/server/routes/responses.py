"""/v1/responses: create, stream, retrieve, list input, count tokens, cancel, delete."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.server.errors import EVENTS, ApiError, answers, not_found
from kvasir.server.http import StrictRoute, TheCall, reply, unless_gone
from kvasir.server.response_store import EventLog, StoredResponse
from kvasir.server.responses import LoggedStream, ResponseJob, ResponseStream, as_listed, conversation, read_prompt
from kvasir.server.routes.stored import Cursor, Limit, Order, page
from kvasir.server.schema.base import DeletedReply
from kvasir.server.schema.responses import (
    InputItemList,
    InputTokensReply,
    InputTokensRequest,
    ResponseReply,
    ResponsesRequest,
)
from kvasir.server.state import ServerState, State
from kvasir.server.tools import responses_tools

_PATIENCE = 5.0  # seconds for an abort to be answered

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post(
    "/v1/responses", responses=answers(ResponseReply, description="The response; with `stream`, events.", stream=EVENTS)
)
async def create_response(body: ResponsesRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a text or a conversation, and store the answer."""
    job = await unless_gone(request, ResponseJob.make(state, call, body))
    if body.background and job.stored is not None:
        job.stored.task = asyncio.create_task(_in_background(job, job.stored.log))
        return reply(job.response) if job.stored.log is None else LoggedStream(job.stored.log)
    if body.stream:
        return ResponseStream(job)
    return reply(await unless_gone(request, job.whole()))


@router.post("/v1/responses/input_tokens", responses=answers(InputTokensReply))
async def count_input_tokens(body: InputTokensRequest, request: Request, state: State, call: TheCall) -> Response:
    """Count the tokens of a prompt without answering it."""
    state.check_model(body.model)
    items = conversation(state, body, call.key)
    tools = responses_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt, _ = await unless_gone(request, read_prompt(state, body, items, tools, for_counting=True))
    return reply(InputTokensReply(input_tokens=len(prompt.token_ids)))


Streamed = Annotated[bool, Query(description="Send the events of a background response that was made with stream.")]
After = Annotated[int | None, Query(ge=0, description="With stream: leave out events up to this sequence number.")]


@router.get(
    "/v1/responses/{response_id}",
    responses=answers(ResponseReply, description="The response; with `stream`, its events.", stream=EVENTS),
)
async def retrieve_response(
    response_id: str,
    request: Request,
    state: State,
    call: TheCall,
    stream: Streamed = False,
    starting_after: After = None,
) -> Response:
    for name in request.query_params:
        if name not in ("stream", "starting_after"):
            raise _unknown_query(name.removesuffix("[]"))  # as clients write lists
    found = _find(state, response_id, call)
    if not stream:
        if starting_after is not None:
            raise RequestError("starting_after is for streams: set stream to true or leave it out.", "starting_after")
        return reply(found.response)
    if found.log is None:
        raise RequestError("Only responses that were made with background and stream can be streamed again.", "stream")
    return LoggedStream(found.log, 0 if starting_after is None else starting_after + 1)


@router.get("/v1/responses/{response_id}/input_items", responses=answers(InputItemList))
async def list_input_items(
    response_id: str,
    request: Request,
    state: State,
    call: TheCall,
    limit: Limit = 20,
    order: Order = "desc",
    after: Cursor = None,
) -> Response:
    """The items that a response was made of: its input, and the conversation before it."""
    for name in request.query_params:
        if name not in ("limit", "order", "after"):
            raise _unknown_query(name.removesuffix("[]"))
    found = _find(state, response_id, call)
    items, has_more = page(found.items[: found.num_input], lambda item: str(item["id"]), limit, order, after)
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    data = [as_listed(item) for item in items]
    return reply(InputItemList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseReply))
async def cancel_response(response_id: str, state: State, call: TheCall) -> Response:
    """End a response that runs in the background."""
    found = _find(state, response_id, call)
    if not found.response.background:
        message = "Only background responses can be cancelled; close the connection to end this one."
        raise ApiError(400, message, "invalid_request", "response_id")
    await _end(found)
    return reply(found.response)


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedReply))
async def delete_response(response_id: str, state: State, call: TheCall) -> Response:
    """Delete a response; one that is running ends."""
    found = _find(state, response_id, call)
    state.responses.delete(response_id, call.key)
    await _end(found)
    return reply(DeletedReply(id=response_id, object="response.deleted"))


async def _end(stored: StoredResponse) -> None:
    """End a running response. A paused engine has not taken the request yet, so its task may have to be cancelled."""
    if stored.request is not None:
        await stored.request.cancel()
    if stored.task is not None and not stored.task.done():
        await asyncio.wait([stored.task], timeout=_PATIENCE)
        stored.task.cancel()
        await asyncio.wait([stored.task])


async def _in_background(job: ResponseJob, log: EventLog | None) -> None:
    job.response.status = "in_progress"
    with suppress(ApiError):  # which the response reports
        await (job.whole() if log is None else job.logged(log))


def _unknown_query(name: str) -> RequestError:
    why = {
        "include": "A stored response is returned as it was created: set include when you create it.",
    }
    return RequestError(why.get(name, f"Stored responses are retrieved by their id alone: leave {name} out."), name)


def _find(state: ServerState, response_id: str, call: TheCall) -> StoredResponse:
    if not state.stores_responses:
        raise not_found(f"Responses are not stored: {state.why_nothing_is_stored}")
    return state.responses.find(response_id, call.key)
