"""OpenAI's batch format without HTTP: each line is validated and answered as the server does with such a request.

A line in: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
A line out: {"id", "custom_id", "response": {"status_code": 200, "request_id", "body": {...}}, "error": null}
A refused request has a response with its status and error body; a line that is not a request has an `error` instead.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import RequestError
from kvasir.server.api_keys import ANYBODY, ApiKey
from kvasir.server.errors import ApiError, as_api_error, openai_body
from kvasir.server.file_store import FINAL, result_id
from kvasir.server.http import (
    JSON_ERRORS,
    LARGE_BODY,
    Call,
    json_problem,
    new_id,
    too_much_json,
    validated,
    without_unknown_fields,
)
from kvasir.server.large_bodies import off_loop
from kvasir.server.routes.chat import ChatJob
from kvasir.server.routes.completions import CompletionJob, CompletionRequest
from kvasir.server.routes.pooling import EmbeddingJob, RerankJob, ScoreJob
from kvasir.server.schema.base import MAX_TOKEN_IDS, encode
from kvasir.server.schema.chat import ChatRequest
from kvasir.server.schema.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from kvasir.server.schema.stored import BatchError, BatchErrors, BatchReply, BatchRequest, RequestCounts
from kvasir.server.state import READY, ServerState

ROUTES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatRequest, ChatJob),
    "/v1/completions": (CompletionRequest, CompletionJob),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingJob),
    "/v1/score": (ScoreRequest, ScoreJob),
    "/score": (ScoreRequest, ScoreJob),
    "/v1/rerank": (RerankRequest, RerankJob),
    "/v2/rerank": (RerankRequest, RerankJob),
    "/rerank": (RerankRequest, RerankJob),
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
    unread: int = 0  # of those that failed, lines that are no requests


class BatchRunner:
    """Answers lines with the engine of a server's state, several at once, for one API key."""

    def __init__(self, state: ServerState, key: ApiKey = ANYBODY) -> None:
        self.state = state
        self.key = key
        self._seen: set[str] = set()

    @classmethod
    def with_engine(cls, state: ServerState, engine: AsyncLLM) -> BatchRunner:
        """A runner without a server."""
        state.set_engine(engine)
        state.phase.enter(READY)
        return cls(state)

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
            counts.unread += result.error is not None
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
        if len(data) < LARGE_BODY:
            read = self.read(data, number)
        else:
            read = await off_loop(lambda: self.read(data, number))
        if isinstance(read, LineError):
            return LineResult(line_id, _custom_id(data), None, read)
        return await self.ask(line_id, read)

    async def ask(self, line_id: str, read: BatchLine) -> LineResult:
        call = Call(line_id.removeprefix("batch_req_"), read.url, self.key)
        try:
            status, body = 200, await self._ask(read, call)
        except Exception as raised:
            error = as_api_error(raised)
            status, body = error.status, openai_body(error)
        return LineResult(line_id, read.custom_id, LineResponse(status, call.id, body))

    def read(self, data: bytes, number: int) -> BatchLine | LineError:
        """The request of a line, or what is wrong with the line."""
        if problem := too_much_json(data, MAX_TOKEN_IDS):
            return LineError("invalid_json_line", f"This line {problem}", number)
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
                given, _ = without_unknown_fields(line.body, schema, self.state.config.unknown_fields, call.id)
                body = _checked(schema, given)
                return await (await job.make(self.state, call, body)).whole()
            except Exception as raised:
                error = as_api_error(raised)
                if error.cause not in ("queue_full", "rate_limit"):
                    raise error from raised
                await asyncio.sleep(error.retry_after or 1.0)  # a batch can wait; a server's client is told to retry


def _checked(schema: Any, body: dict[str, Any]) -> Any:
    if body.get("stream"):
        message = "stream cannot be true in a batch: leave it out."
        raise ApiError(400, message, "invalid_request", "stream")
    return validated(schema, body)


def _custom_id(data: bytes) -> str | None:
    """The custom_id of a line that is not a request, if it has one."""
    if too_much_json(data, MAX_TOKEN_IDS):
        return None
    try:
        found = msgspec.json.decode(data)
    except JSON_ERRORS:
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def write_line(result: LineResult) -> bytes:
    return encode(result) + b"\n"


# ---------------------------------------------------------------- batches of a server

_WINDOW = 24 * 3600  # seconds
_MAX_ERRORS = 100  # of a file that are reported
_MAX_RUNNING = 32  # batches of a key; each has open files, tasks and lines in memory


class ServerBatch:
    """A batch of /v1/batches: its record on disk, and how it runs."""

    def __init__(self, state: ServerState, key: ApiKey, record: BatchReply) -> None:
        self.state = state
        self.key = key
        self.record = record
        self._held = ExitStack()  # while it runs
        self._outputs: dict[bool, tuple[str, FileIO]] = {}  # id and content of the output and error files

    @classmethod
    def create(cls, state: ServerState, key: ApiKey, body: BatchRequest) -> ServerBatch:
        source = state.files.find_file(key, body.input_file_id)
        if source.purpose != "batch":
            raise RequestError(f"The file {source.id} has the purpose {source.purpose}, not batch.", "input_file_id")
        state.files.check_room(key)
        running = sum(task.get_name() == key.name for task in state.batches.values())
        if running >= _MAX_RUNNING:
            message = f"{running} batches of this key are running, as many as may: wait until one is completed."
            raise ApiError(429, message, "rate_limit", code="rate_limit_exceeded", retry_after=60.0)
        now = int(time.time())
        record = BatchReply(
            id=f"batch_{new_id()}",
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + _WINDOW,
            request_counts=RequestCounts(),
            metadata=body.metadata,
        )
        made = cls(state, key, record)
        with ExitStack() as held:
            held.enter_context(state.files.running(key, record.id))  # first: others would see that nobody runs it
            made._save()
            made._held = held.pop_all()
        task = state.batches[record.id] = asyncio.create_task(made.run(), name=key.name)
        task.add_done_callback(lambda done: state.batches.pop(record.id, None))
        return made

    async def run(self) -> None:
        """Run to the end; whatever happens is in the record."""
        with self._held:
            try:
                async with asyncio.timeout(_WINDOW):
                    await self._run()
            except TimeoutError:
                self._end("expired")
            except (Exception, asyncio.CancelledError) as error:
                found = next(iter(getattr(error, "exceptions", [error])))  # of several that a task group raises
                stopped = isinstance(found, asyncio.CancelledError | _Stopped)
                message = "The server was stopped." if stopped else as_api_error(found).message
                self._fail([BatchError(code="server_error", message=message)])

    async def _run(self) -> None:
        runner, counts = BatchRunner(self.state, self.key), self.record.request_counts
        path = self.state.files.content_path(self.key, self.record.input_file_id)
        lines, errors = await asyncio.to_thread(self._check, BatchRunner(self.state, self.key), path)
        if errors:
            self._fail(errors)
            return
        counts.total = lines
        self._enter("in_progress")
        with open(path, "rb") as file:
            await runner.run(self._until_cancelled(file), self._take, self.state.config.batch_concurrency)
        is_whole = counts.completed + counts.failed == counts.total
        self._enter("finalizing" if is_whole else "cancelling")
        self._end("completed" if is_whole else "cancelled")

    def _check(self, runner: BatchRunner, path: Path) -> tuple[int, list[BatchError]]:
        """The number of requests in a file, and what is wrong with its lines."""
        count, errors = 0, list[BatchError]()
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.strip():
                    continue
                count += 1
                read = runner.read(data, number)
                if isinstance(read, BatchLine) and read.url != self.record.endpoint:
                    message = f"url {read.url} is not the batch's endpoint {self.record.endpoint}."
                    read = LineError("mismatched_url", message, number, "url")
                if isinstance(read, LineError) and len(errors) < _MAX_ERRORS:
                    param = read.param if isinstance(read.param, str) else None
                    errors.append(BatchError(code=read.code, message=read.message, line=read.line, param=param))
        if not count:
            errors.append(BatchError(code="empty_file", message="The input file has no requests."))
        return count, errors

    async def _until_cancelled(self, lines: Iterable[bytes]) -> AsyncIterator[bytes]:
        for line in lines:
            if self.state.files.is_to_cancel(self.key, self.record.id):
                return  # requests that run are completed
            yield line

    def _take(self, result: LineResult) -> None:
        response = result.response
        engine, phase = self.state.engine_or_none, self.state.phase
        takes_requests = engine is not None and not engine.errored and phase.is_ready
        if response is not None and response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and not takes_requests:
            raise _Stopped  # the server drains, or its engine has died: other lines would fail alike
        self._write_result(result.ok, write_line(result))
        counts = self.record.request_counts
        counts.completed += result.ok
        counts.failed += not result.ok
        self._save()

    def _write_result(self, is_ok: bool, line: bytes) -> None:
        """Write a line at once, so that it is there if the server is killed."""
        self.state.files.take_room(len(line))
        if is_ok not in self._outputs:
            file_id = result_id(self.record.id, "output" if is_ok else "error")
            path = self.state.files.content_path(self.key, file_id)
            self._outputs[is_ok] = file_id, path.open("wb", buffering=0)
        _, file = self._outputs[is_ok]
        before = file.tell()
        if file.write(line) != len(line):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)

    def _close_outputs(self) -> None:
        """Make the results visible, those of a batch that was ended early too."""
        for is_ok, (file_id, file) in self._outputs.items():
            file.close()
            name = f"{self.record.id}_{'output' if is_ok else 'error'}.jsonl"
            self.state.files.register(self.key, file_id, name, "batch_output")
            if is_ok:
                self.record.output_file_id = file_id
            else:
                self.record.error_file_id = file_id
        self._outputs = {}

    def _fail(self, errors: list[BatchError]) -> None:
        self.record.errors = BatchErrors(data=errors)
        self._end("failed")

    def _end(self, status: str) -> None:
        self._close_outputs()
        self._enter(status)

    def _enter(self, status: str) -> None:
        self.record.status = status
        setattr(self.record, f"{status}_at", int(time.time()))
        self._save()

    def _save(self) -> None:
        self.state.files.save_batch(self.key, self.record)


class _Stopped(Exception):
    """The server takes no more requests."""


def find_batch(state: ServerState, key: ApiKey, batch_id: str) -> BatchReply:
    return _current(state, key, state.files.find_batch(key, batch_id))


def cancel_batch(state: ServerState, key: ApiKey, batch_id: str) -> BatchReply:
    found = find_batch(state, key, batch_id)
    if found.status in FINAL:
        raise ApiError(409, f"The batch is {found.status}: it cannot be cancelled any more.", "conflict", "batch_id")
    state.files.ask_to_cancel(key, batch_id)
    return _current(state, key, found)


def _current(state: ServerState, key: ApiKey, record: BatchReply) -> BatchReply:
    """A record as it is now: it may be about to be cancelled, or belong to a process that has ended."""
    if record.status in FINAL:
        return record
    with state.files.running(key, record.id) as is_free:
        if is_free:
            record = state.files.find_batch(key, record.id)  # its process may have ended it meanwhile
            if record.status not in FINAL:
                state.files.settle(key, record)
            return record
    if state.files.is_to_cancel(key, record.id):
        record.status, record.cancelling_at = "cancelling", record.cancelling_at or int(time.time())
    return record
