"""One response of /v1/responses: its input as a conversation, how it runs, its events, whether it is stored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from kvasir.errors import RequestError
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import content_of
from kvasir.server.api_keys import ApiKey
from kvasir.server.api_request import ApiRequest, read_chat
from kvasir.server.errors import ApiError, as_api_error
from kvasir.server.event_stream import EventStream
from kvasir.server.http import Call, new_id
from kvasir.server.logprobs import LogprobWriter
from kvasir.server.response_store import ResponseStore, StoredResponse
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.responses import (
    LOGPROBS,
    InputDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
)
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState

_STATUS = {"length": "incomplete", "timeout": "incomplete", "abort": "cancelled"}
_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}
# This interface's names of what the chat template and the engine may refuse.
_FIELD_NAMES = {"messages": "input", "reasoning_effort": "reasoning", "logprobs": "top_logprobs"}


@dataclass(slots=True)
class ResponseJob:
    """A request, ready to run, and the response that it becomes."""

    request: ApiRequest
    response: ResponseReply
    item_id: str
    num_logprobs: int | None
    stored: StoredResponse | None
    store: ResponseStore

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ResponsesRequest) -> ResponseJob:
        store = state.responses
        model = state.check_model(body.model)
        stores = _stores(state, body)
        messages = [*_conversation(state, body, call.key), *messages_of(body.input)]
        request = await _request(state, call, body, messages)
        response = _first_state(body, request, model, stores)
        stored = StoredResponse(response, messages, call.key.name, request) if stores else None
        if stored is not None:
            store.add(stored)
        wants_logprobs = LOGPROBS in (body.include or [])
        number = (body.top_logprobs or 0) if wants_logprobs else None
        return cls(request, response, f"msg_{new_id()}", number, stored, store)

    async def whole(self) -> ResponseReply:
        """Run to the end and return the response."""
        try:
            (output,) = await self.request.whole()
            self.request.check(output)
            (each,) = output.outputs
            text = content_of(self.request.parts.read(0, each))
            self.complete(text, self.logprobs(each), each.finish_reason or "stop")
        except Exception as error:
            if isinstance(error, ApiError):
                self.fail(error)
            raise
        finally:
            self.ended()
        return self.response

    def logprobs(self, each: CompletionOutput) -> list[Any]:
        if self.num_logprobs is None or each.logprobs is None:
            return []
        writer = LogprobWriter(self.request.engine.tokenizer)
        return list(writer.chat(each.token_ids, each.logprobs, self.num_logprobs).content)

    # ------------------------------------------------------------ its end

    def complete(self, text: str, logprobs: list[Any], reason: str) -> None:
        status = _STATUS.get(reason, "completed")
        part = OutputText(text=text, annotations=[], logprobs=logprobs)
        done = "completed" if status == "completed" else "incomplete"
        response, usage = self.response, self.request.usage()
        response.output = [OutputMessage(id=self.item_id, status=done, content=[part])]
        response.status = status
        response.incomplete_details = {"reason": _INCOMPLETE[reason]} if reason in _INCOMPLETE else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=self.request.tokens.num_cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
        )
        if self.stored is not None:
            self.stored.messages.append(Message(role="assistant", content=text))

    def fail(self, error: ApiError) -> None:
        self.response.status = "failed"
        self.response.error = ResponseError(code=error.code or error.cause, message=error.message)

    def ended(self) -> None:
        """The request has ended, with an answer or without."""
        if self.response.status in ("queued", "in_progress"):
            self.response.status = "cancelled"
        if self.stored is not None:
            self.stored.request = None
            self.store.update(self.stored)


async def _request(state: ServerState, call: Call, body: ResponsesRequest, messages: list[Message]) -> ApiRequest:
    effort = None if body.reasoning is None else body.reasoning.effort
    shown = messages if body.instructions is None else [Message(role="system", content=body.instructions), *messages]
    tools = None if state.config.exclude_tools_when_tool_choice_none else body.tools
    fields = ChatTemplateFields(messages=shown, tools=tools, chat_template_kwargs=body.chat_template_kwargs)
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    try:
        prompt = await read_chat(state, fields, salt=body.cache_salt, **variables)
    except RequestError as error:
        raise as_api_error(error, _FIELD_NAMES) from error
    params = sampling_params(
        body,
        state.default_params,
        max_tokens=body.max_output_tokens or state.default_max_tokens(None),
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or []) else None,
        stream=bool(body.stream),
    )
    user = body.user or body.safety_identifier
    return ApiRequest(state, call, [prompt], params, body.priority or 0, body.timeout, user, _FIELD_NAMES)


def _stores(state: ServerState, body: ResponsesRequest) -> bool:
    """Whether this response is stored: the server stores any, and the body does not refuse."""
    if state.stores_responses:
        return body.store is not False
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            raise RequestError(f"{name} needs stored responses: {state.why_nothing_is_stored}", name)
    return False


def _conversation(state: ServerState, body: ResponsesRequest, key: ApiKey) -> list[Message]:
    """The messages up to the previous response. Its instructions do not carry over, as OpenAI defines it."""
    if body.previous_response_id is None:
        return []
    found = state.responses.find(body.previous_response_id, key)
    if found.request is not None:
        message = "The previous response is still running: wait until it is completed."
        raise RequestError(message, "previous_response_id")
    return list(found.messages)


def _first_state(body: ResponsesRequest, request: ApiRequest, model: str, stores: bool) -> ResponseReply:
    """The response before it has any output."""
    return ResponseReply(
        id=f"resp_{new_id()}",
        created_at=time.time(),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        store=stores,
        temperature=request.params.temperature,
        text={"format": {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=request.params.top_p,
        user=body.user,
    )


# ---------------------------------------------------------------- items of the input


def messages_of(given: str | list[dict[str, Any]]) -> list[Message]:
    """The input's items as messages."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_message(item) for item in items]


def _message(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        return _plain(item)
    if kind == "function_call":
        function = {"name": _text(item, "name"), "arguments": _text(item, "arguments")}
        call = {"id": _text(item, "call_id"), "type": "function", "function": function}
        return Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    if kind == "function_call_output":
        return Message.model_validate(
            {"role": "tool", "content": _output(item), "tool_call_id": _text(item, "call_id")}
        )
    message = f"Input items of type {kind!r} are not supported; use message, function_call or function_call_output."
    raise RequestError(message, "input")


def _plain(item: dict[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RequestError("A message in input must have a role and content.", "input")
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        raise RequestError("A message's content must be a string or a list of content parts.", "input")
    return Message(role=role, content=content)


def _output(item: dict[str, Any]) -> str | list[str | dict[str, Any]]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, str | dict) for part in output):
        return output
    raise RequestError("A function_call_output must have output, a string.", "input")


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"An item of type {item['type']!r} must have {name}, a string.", "input")
    return value


# ---------------------------------------------------------------- the stream


class ResponseStream(EventStream):
    """Sends a response's events, and updates the stored response when the stream ends, in whatever way."""

    def __init__(self, job: ResponseJob) -> None:
        super().__init__(job.request, ResponseEvents(job))
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.ended()


class ResponseEvents:
    """Writes the events of a response in OpenAI's order."""

    def __init__(self, job: ResponseJob) -> None:
        self.job = job
        self._number = 0
        self._place = {"item_id": job.item_id, "output_index": 0, "content_index": 0}
        self._is_open = False  # the first events are written
        self._text: list[str] = []
        self._logprobs: list[Any] = []

    def write(self, output: RequestOutput) -> bytes:
        job = self.job
        job.request.check(output)
        (each,) = output.outputs
        frames = b"" if self._is_open else self._opening()
        self._is_open = True
        text = content_of(job.request.parts.read(0, each))
        if text or each.logprobs:
            new = job.logprobs(each)
            self._text.append(text)
            self._logprobs += new
            frames += self._event("response.output_text.delta", **self._place, delta=text, logprobs=new)
        if each.finish_reason is not None:
            job.complete("".join(self._text), self._logprobs, each.finish_reason)
            job.ended()
            frames += self._closing()
        return frames

    def finish(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        self.job.fail(as_api_error(error))
        return self._event("response.failed", response=self.job.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def _opening(self) -> bytes:
        part = OutputText(text="", annotations=[], logprobs=[])
        item = {"id": self.job.item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return (
            self._event("response.created", response=self.job.response)
            + self._event("response.in_progress", response=self.job.response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=part)
        )

    def _closing(self) -> bytes:
        response = self.job.response
        (item,) = response.output
        (part,) = item.content
        return (
            self._event("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response.status}", response=response)
        )
