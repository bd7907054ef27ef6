"""/v1/files and /v1/batches: requests in files, on local disk."""

from __future__ import annotations

import asyncio
from email.message import Message
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from kvasir.errors import RequestError
from kvasir.server.batch import ServerBatch, cancel_batch, find_batch, list_batches
from kvasir.server.errors import answers
from kvasir.server.http import StrictRoute, TheCall, reply
from kvasir.server.routes.stored_chats import Cursor, Limit, Order, page
from kvasir.server.schema.base import DeletedReply
from kvasir.server.schema.stored import BatchList, BatchReply, BatchRequest, FileList, FileReply
from kvasir.server.state import State

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])

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
    found = [each for each in state.files.files(call.key) if purpose in (None, each.purpose)]
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
    data, has_more = page(list_batches(state, call.key), lambda each: each.id, limit, "desc", after)
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
    """The fields of multipart/form-data by name: file names and contents."""
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
