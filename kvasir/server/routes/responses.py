"""/v1/responses: create, stream, retrieve, cancel, delete."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.server.errors import ApiError, not_found
from kvasir.server.http import StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.response_store import StoredResponse
from kvasir.server.responses import ResponseJob, ResponseStream
from kvasir.server.schema.responses import ResponseReply, ResponsesRequest
from kvasir.server.state import ServerState, State

_PATIENCE = 5.0  # seconds for an abort to be answered

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/responses", responses=answers(ResponseReply, "The response; with `stream`, events."))
async def create_response(body: ResponsesRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a text or a conversation, and store the answer."""
    job = await unless_gone(request, ResponseJob.make(state, call, body))
    if body.stream:
        return ResponseStream(job)
    if body.background and job.stored is not None:
        job.stored.task = asyncio.create_task(_in_background(job))
        return reply(job.response)
    return reply(await unless_gone(request, job.whole()))


@router.get("/v1/responses/{response_id}", responses=answers(ResponseReply))
async def retrieve_response(response_id: str, request: Request, state: State, call: TheCall) -> Response:
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):  # the default
            raise _unknown_query(name.removesuffix("[]"))  # as clients write lists
    return reply(_find(state, response_id, call).response)


@router.post("/v1/responses/{response_id}/cancel", responses=answers(ResponseReply))
async def cancel_response(response_id: str, state: State, call: TheCall) -> Response:
    """End a response that runs in the background."""
    found = _find(state, response_id, call)
    if not found.response.background:
        message = "Only background responses can be cancelled; close the connection to end this one."
        raise ApiError(400, message, "invalid_request", "response_id")
    await _end(found)
    return reply(found.response)


@router.delete("/v1/responses/{response_id}", responses=answers(ResponseReply))
async def delete_response(response_id: str, state: State, call: TheCall) -> Response:
    """Delete a response; one that is running ends."""
    found = _find(state, response_id, call)
    state.responses.delete(response_id, call.key)
    await _end(found)
    return reply({"id": response_id, "object": "response.deleted", "deleted": True})


async def _end(stored: StoredResponse) -> None:
    """End a running response. A paused engine has not taken the request yet, so its task may have to be cancelled."""
    if stored.request is not None:
        await stored.request.cancel()
    if stored.task is not None and not stored.task.done():
        await asyncio.wait([stored.task], timeout=_PATIENCE)
        stored.task.cancel()
        await asyncio.wait([stored.task])


async def _in_background(job: ResponseJob) -> None:
    job.response.status = "in_progress"
    with suppress(ApiError):  # which the response reports
        await job.whole()


def _unknown_query(name: str) -> RequestError:
    why = {
        "stream": "Stored responses are not streamed: leave stream out.",
        "starting_after": "Stored responses are not streamed: leave starting_after out.",
        "include": "A stored response is returned as it was created: set include when you create it.",
    }
    return RequestError(why.get(name, f"Stored responses are retrieved by their id alone: leave {name} out."), name)


def _find(state: ServerState, response_id: str, call: TheCall) -> StoredResponse:
    if not state.stores_responses:
        raise not_found(f"Responses are not stored: {state.why_nothing_is_stored}")
    return state.responses.find(response_id, call.key)
