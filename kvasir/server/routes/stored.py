"""What is stored: chat completions (list, retrieve, update, delete), and files of requests with their batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from email.message import Message
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from kvasir.errors import RequestError
from kvasir.server.batch import ServerBatch, cancel_batch, find_batch
from kvasir.server.errors import answers, not_found
from kvasir.server.file_store import FINAL
from kvasir.server.http import StrictRoute, TheCall, reply
from kvasir.server.response_store import StoredCompletion
from kvasir.server.schema.base import DeletedReply, encode
from kvasir.server.schema.chat import ChatCompletion
from kvasir.server.schema.stored import (
    BatchList,
    BatchReply,
    BatchRequest,
    CompletionList,
    CompletionUpdate,
    FileList,
    FileReply,
    StoredMessageList,
)
from kvasir.server.state import ServerState, State

T = TypeVar("T")
router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

_MAX_PAGE = 4 << 20  # bytes of a page with several entries
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
    """Return one page of a list that is given oldest first, and whether more follow. Large entries make a page
    shorter."""
    found = list(entries) if order == "asc" else list(reversed(entries))
    if after is not None:
        place = next((place for place, entry in enumerate(found) if id_of(entry) == after), None)
        if place is None:
            raise RequestError(f"The list has no entry {after!r}.", "after")
        found = found[place + 1 :]
    number, size = 0, 0
    for entry in found[:limit]:
        size += len(encode(entry))
        if number and size > _MAX_PAGE:
            break
        number += 1
    return found[:number], len(found) > number


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


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_CONTENT = {**answers(FileReply), 200: {"description": "The file.", "content": {"application/octet-stream": {}}}}
_MAX_PARTS = 16
_MAX_PART_HEAD = 8192  # bytes
FileLimit = Annotated[int, Query(ge=1, le=10_000, description="Number of files to return at most.")]
Purpose = Annotated[str | None, Query(description="Only files of this purpose.")]


@router.post("/v1/files", responses=answers(FileReply), openapi_extra=_UPLOAD)
async def upload_file(request: Request, state: State, call: TheCall) -> Response:
    """Upload a file of requests for a batch."""
    store = state.files
    fields = read_form(request.headers.get("content-type", ""), await request.body())
    for name in fields:
        if name not in ("file", "purpose"):
            raise RequestError(f"{name[:100]} is not supported: a file stays until it is deleted.", name[:100])
    filename, content = fields.get("file", (None, b""))
    if filename is None:
        raise RequestError("The form must have file, with a filename.", "file")
    purpose = fields.get("purpose", (None, b""))[1].decode(errors="replace")
    if purpose != "batch":
        raise RequestError("purpose must be 'batch': files are used by batches only.", "purpose")
    return reply(await asyncio.to_thread(store.add_file, call.key, filename[:255], purpose, content))


@router.get("/v1/files", responses=answers(FileList))
async def list_files(
    state: State,
    call: TheCall,
    limit: FileLimit = 10_000,
    order: Order = "desc",
    after: Cursor = None,
    purpose: Purpose = None,
) -> Response:
    found = [each for each in await asyncio.to_thread(state.files.files, call.key) if purpose in (None, each.purpose)]
    data, has_more = page(found, lambda each: each.id, limit, order, after)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return reply(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.get("/v1/files/{file_id}", responses=answers(FileReply))
async def retrieve_file(file_id: str, state: State, call: TheCall) -> Response:
    return reply(state.files.find_file(call.key, file_id))


@router.delete("/v1/files/{file_id}", responses=answers(DeletedReply))
async def delete_file(file_id: str, state: State, call: TheCall) -> Response:
    state.files.delete_file(call.key, file_id)
    return reply(DeletedReply(id=file_id, object="file"))


@router.get("/v1/files/{file_id}/content", responses=_CONTENT, response_class=FileResponse)
async def file_content(file_id: str, state: State, call: TheCall) -> Response:
    found = state.files.find_file(call.key, file_id)
    return FileResponse(state.files.content_path(call.key, found.id), media_type="application/octet-stream")


@router.post("/v1/batches", responses=answers(BatchReply))
async def create_batch(body: BatchRequest, state: State, call: TheCall) -> Response:
    """Answer the requests of an uploaded file in the background; their results are files, too."""
    _ = state.engine  # which must be there
    return reply(ServerBatch.create(state, call.key, body).record)


@router.get("/v1/batches", responses=answers(BatchList))
async def list_all_batches(state: State, call: TheCall, limit: Limit = 20, after: Cursor = None) -> Response:
    records = await asyncio.to_thread(state.files.batches, call.key)
    found, has_more = page(records, lambda each: each.id, limit, "desc", after)
    data = [each if each.status in FINAL else find_batch(state, call.key, each.id) for each in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return reply(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.get("/v1/batches/{batch_id}", responses=answers(BatchReply))
async def retrieve_batch(batch_id: str, state: State, call: TheCall) -> Response:
    return reply(find_batch(state, call.key, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", responses=answers(BatchReply))
async def cancel(batch_id: str, state: State, call: TheCall) -> Response:
    """End a batch. Requests that run are completed; what is done stays in the output file."""
    return reply(cancel_batch(state, call.key, batch_id))


# ---------------------------------------------------------------- forms


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str | None, bytes]]:
    """Read the fields of multipart/form-data by name: file names and contents."""
    header = _header("Content-Type", content_type)
    boundary = header.get_param("boundary", header="Content-Type")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise RequestError("Send the file as multipart/form-data with the fields file and purpose.")
    found: dict[str, tuple[str | None, bytes]] = {}
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), _MAX_PARTS + 2)
    if len(parts) > _MAX_PARTS + 1:  # the end counts, too
        raise RequestError(f"The form has more than {_MAX_PARTS} parts: only file and purpose are known.")
    if not parts or not parts[-1].startswith(b"--"):
        raise RequestError("The form is not complete: its last boundary is missing.")
    for part in parts[:-1]:
        head, mark, content = part.partition(b"\r\n\r\n")
        if len(head) > _MAX_PART_HEAD:
            raise RequestError(f"The head of a part of the form has more than {_MAX_PART_HEAD} bytes.")
        lines = [line.partition(":") for line in head.decode("utf-8", "replace").split("\r\n")]
        given = next((value for name, _, value in lines if name.strip().lower() == "content-disposition"), "")
        place = _header("Content-Disposition", given.strip())
        name, filename = (place.get_param(each, header="Content-Disposition") for each in ("name", "filename"))
        if not mark or not isinstance(name, str):
            raise RequestError("A part of the form has no name.")
        found[name] = (filename if isinstance(filename, str) else None), content
    return found


def _header(name: str, value: str) -> Message[Any, Any]:
    made = Message()
    made[name] = value.replace("\n", " ").replace("\r", " ")
    return made
