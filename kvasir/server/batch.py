"""OpenAI's batch format without HTTP: each line is validated and answered as the server does with such a request.

A line in: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
A line out: {"id", "custom_id", "response": {"status_code": 200, "request_id", "body": {...}}, "error": null}
A refused request has a response with its status and error body; a line that is not a request has an `error` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET, UnsetType
from pydantic import ValidationError

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.server.errors import ApiError, as_api_error, openai_body
from kvasir.server.http import JSON_ERRORS, Call, json_problem, new_id
from kvasir.server.routes.chat import ChatJob
from kvasir.server.routes.completions import CompletionJob
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import ChatRequest
from kvasir.server.schema.completions import CompletionRequest
from kvasir.server.state import READY, ServerState

ROUTES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatRequest, ChatJob),
    "/v1/completions": (CompletionRequest, CompletionJob),
}


class BatchLine(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class LineError(msgspec.Struct):
    code: str
    message: str
    line: int
    param: str | UnsetType = UNSET


class LineResult(msgspec.Struct):
    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None = None

    @property
    def ok(self) -> bool:
        return self.response is not None and self.response.status_code == HTTPStatus.OK


@dataclass(slots=True)
class Counts:
    answered: int = 0
    failed: int = 0


class BatchRunner:
    """Answers lines with an engine, several at once."""

    def __init__(self, state: ServerState, engine: AsyncLLM) -> None:
        self.state = state
        state.set_engine(engine)
        state.phase.enter(READY)
        self._seen: set[str] = set()

    async def run(
        self, lines: AsyncIterator[bytes], write: Callable[[LineResult], None], max_concurrency: int
    ) -> Counts:
        """Answer all lines. Results are written as they come, not in the order of the lines."""
        counts, gate, number = Counts(), asyncio.Semaphore(max_concurrency), 0

        async def one(coming: Awaitable[LineResult]) -> None:
            try:
                result = await coming
            finally:
                gate.release()
            counts.answered += result.ok
            counts.failed += not result.ok
            write(result)

        async with asyncio.TaskGroup() as tasks:
            async for data in lines:
                number += 1
                if data.strip():
                    await gate.acquire()
                    tasks.create_task(one(self.answer(data, number)))
        return counts

    async def answer(self, data: bytes, number: int) -> LineResult:
        """Answer one line; an error becomes its result."""
        line_id = f"batch_req_{new_id()}"
        read = self._read(data, number)
        if isinstance(read, LineError):
            return LineResult(line_id, _custom_id(data), None, read)
        call = Call(line_id.removeprefix("batch_req_"), read.url)
        try:
            status, body = 200, await self._ask(read, call)
        except Exception as raised:
            error = as_api_error(raised)
            status, body = error.status, openai_body(error)
        return LineResult(line_id, read.custom_id, LineResponse(status, call.id, body))

    def _read(self, data: bytes, number: int) -> BatchLine | LineError:
        try:
            line = msgspec.json.decode(data, type=BatchLine)
        except msgspec.ValidationError as error:
            message = f"{error}. A line has custom_id, method, url and body."
            return LineError("invalid_request", message, number)
        except JSON_ERRORS as error:
            return LineError("invalid_json_line", f"This line is not JSON: {json_problem(error)}.", number)
        if line.method != "POST":
            return LineError("invalid_method", f"method must be POST, not {line.method}.", number, "method")
        if line.url not in ROUTES:
            message = f"url {line.url} cannot be used in a batch. Possible: {', '.join(ROUTES)}."
            return LineError("invalid_url", message, number, "url")
        if line.custom_id in self._seen:
            message = f"custom_id {line.custom_id} is already used by an earlier line."
            return LineError("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(line.custom_id)
        return line

    async def _ask(self, line: BatchLine, call: Call) -> Any:
        schema, job = ROUTES[line.url]
        while True:
            try:
                body = _checked(schema, line.body)
                return await (await job.make(self.state, call, body)).whole()
            except Exception as raised:
                error = as_api_error(raised)
                if error.cause != "queue_full":
                    raise error from raised
                await asyncio.sleep(error.retry_after or 1.0)  # a batch can wait; a server's client is told to retry


def _checked(schema: Any, body: dict[str, Any]) -> Any:
    if body.get("stream"):
        message = "stream cannot be true in a batch: leave it out."
        raise ApiError(400, message, "invalid_request", "stream")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from error


def _custom_id(data: bytes) -> str | None:
    """The custom_id of a line that is not a request, if it has one."""
    try:
        found = msgspec.json.decode(data)
    except JSON_ERRORS:
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def write_line(result: LineResult) -> bytes:
    return encode(result) + b"\n"
