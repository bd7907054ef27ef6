"""One response of /v1/responses: how it runs, what it says of itself, whether it is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from kvasir.errors import RequestError
from kvasir.outputs import CompletionOutput
from kvasir.server.api_keys import Key
from kvasir.server.api_request import Run, Terms
from kvasir.server.errors import ApiError, as_api_error
from kvasir.server.http import Call, new_id
from kvasir.server.logprobs import LogprobWriter
from kvasir.server.params import default_max_tokens, sampling_params
from kvasir.server.prompts import PromptMaker
from kvasir.server.response_store import ResponseStore, Stored
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
from kvasir.server.state import ServerState

_STATUS = {"length": "incomplete", "timeout": "incomplete", "abort": "cancelled"}
_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}

_NAMES_HERE = {"messages": "input", "reasoning_effort": "reasoning"}  # of what a chat template may refuse


@dataclass(slots=True)
class ResponseJob:
    run: Run
    response: ResponseReply
    item_id: str
    num_logprobs: int | None
    stored: Stored | None
    store: ResponseStore

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ResponsesRequest) -> ResponseJob:
        store = state.responses
        model = state.check_model(body.model)
        keeps = _keeps(state, body)
        before = _conversation(state, body, call.key)
        messages = messages_of(body.input, None, before)
        run = await _run(state, call, body, messages)
        response = _begun(body, run, model, keeps)
        stored = Stored(response, messages, call.key.name, run) if keeps else None
        if stored is not None:
            store.keep(stored)
        wants_logprobs = LOGPROBS in (body.include or [])
        number = (body.top_logprobs or 0) if wants_logprobs else None
        return cls(run, response, f"msg_{new_id()}", number, stored, store)

    async def whole(self) -> ResponseReply:
        """Run to the end."""
        try:
            (output,) = await self.run.whole()
            self.run.check(output)
            (each,) = output.outputs
            self.complete(each.text, self.logprobs(each), each.finish_reason or "stop")
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
        writer = LogprobWriter(self.run.engine.tokenizer)
        return list(writer.chat(each.token_ids, each.logprobs, self.num_logprobs).content)

    # ------------------------------------------------------------ how it ends

    def complete(self, text: str, logprobs: list[Any], reason: str) -> None:
        status = _STATUS.get(reason, "completed")
        part = OutputText(text=text, annotations=[], logprobs=logprobs)
        done = "completed" if status == "completed" else "incomplete"
        response, usage = self.response, self.run.usage()
        response.output = [OutputMessage(id=self.item_id, status=done, content=[part])]
        response.status = status
        response.incomplete_details = {"reason": _INCOMPLETE[reason]} if reason in _INCOMPLETE else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=self.run.num_cached),
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
        """It runs no more, however that came."""
        if self.response.status in ("queued", "in_progress"):
            self.response.status = "cancelled"
        if self.stored is not None:
            self.stored.run = None
            self.store.update(self.stored)


async def _run(state: ServerState, call: Call, body: ResponsesRequest, messages: list[Message]) -> Run:
    maker = PromptMaker(state, salt=body.cache_salt)
    effort = None if body.reasoning is None else body.reasoning.effort
    shown = messages if body.instructions is None else [Message(role="system", content=body.instructions), *messages]
    tools = None if state.config.exclude_tools_when_tool_choice_none else body.tools
    fields = ChatTemplateFields(messages=shown, tools=tools, chat_template_kwargs=body.chat_template_kwargs)
    try:
        prompt = await maker.chat(fields, **({} if effort is None else {"reasoning_effort": effort}))
    except RequestError as error:
        if error.parameter not in _NAMES_HERE:
            raise
        raise RequestError(str(error), _NAMES_HERE[error.parameter]) from error
    logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or []) else None
    max_tokens = body.max_output_tokens or default_max_tokens(state, None)
    params = sampling_params(state, body, max_tokens=max_tokens, logprobs=logprobs, stream=bool(body.stream))
    terms = Terms(body.priority or 0, body.timeout, body.user or body.safety_identifier)
    return Run(state, call, [prompt], params, terms)


def _keeps(state: ServerState, body: ResponsesRequest) -> bool:
    """Whether this response is stored. It is not where nobody could find it again."""
    if state.keeps_responses:
        return body.store is not False
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            raise RequestError(f"{name} needs stored responses: {state.why_nothing_is_kept}", name)
    return False


def _conversation(state: ServerState, body: ResponsesRequest, key: Key) -> list[Message]:
    if body.previous_response_id is None:
        return []
    found = state.responses.find(body.previous_response_id, key)
    if found.run is not None:
        raise RequestError("The previous response is still running: wait for it.", "previous_response_id")
    return list(found.messages)


def _begun(body: ResponsesRequest, run: Run, model: str, keeps: bool) -> ResponseReply:
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
        store=keeps,
        temperature=run.params.temperature,
        text={"format": {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=run.params.top_p,
        user=body.user,
    )


# ----------------------------------------------------------------
# Items of /v1/responses as the messages of a conversation.


def messages_of(given: str | list[dict[str, Any]], instructions: str | None, before: list[Message]) -> list[Message]:
    """`before` is the conversation so far; its instructions do not carry over, as OpenAI has it."""
    start = [] if instructions is None else [Message(role="system", content=instructions)]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [*start, *before, *(_message(item) for item in items)]


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
    message = f"Input items of type {kind!r} are not supported; messages, function_call and function_call_output are."
    raise RequestError(message, "input")


def _plain(item: dict[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RequestError("A message in input must have a role and content.", "input")
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        raise RequestError("A message's content must be a text or a list of content parts.", "input")
    return Message(role=role, content=content)


def _output(item: dict[str, Any]) -> str | list[str | dict[str, Any]]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, str | dict) for part in output):
        return output
    raise RequestError("A function_call_output must have output, a text.", "input")


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"An item of type {item['type']!r} must have {name}, a text.", "input")
    return value


# ----------------------------------------------------------------
# The events of a streamed response, in OpenAI's order.


class ResponseEvents:
    def __init__(self, job: ResponseJob) -> None:
        self.job = job
        self._number = 0
        self._place = {"item_id": job.item_id, "output_index": 0, "content_index": 0}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, source = self.job, self.job.run.outputs()
        text: list[str] = []
        logprobs: list[Any] = []
        opened = False
        try:
            async for _, output in source:
                job.run.check(output)
                (each,) = output.outputs
                frames = b"" if opened else self._opening()
                opened = True
                if each.text or each.logprobs:
                    new = job.logprobs(each)
                    text.append(each.text)
                    logprobs += new
                    frames += self._event("response.output_text.delta", **self._place, delta=each.text, logprobs=new)
                if each.finish_reason is not None:
                    job.complete("".join(text), logprobs, each.finish_reason)
                    frames += self._closing()
                if frames:
                    yield frames
        finally:
            await source.aclose()
            job.ended()

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that fails on its way."""
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
