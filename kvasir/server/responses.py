"""One response of /v1/responses: its input as a conversation, how it runs, its items and events, whether it is stored.

Items are reasoning, a message, tool calls. Parts of the answer become items as they come, each with the events that
OpenAI's clients know it by; the items of an input become messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import Content, OutputPart, Reasoning, ToolCall
from kvasir.server.answers import ChatAnswer, RequestTools
from kvasir.server.api_keys import ApiKey
from kvasir.server.api_request import ApiRequest, answer_of, read_chat, within
from kvasir.server.errors import EVENTS, ApiError, as_api_error
from kvasir.server.event_stream import EventStream
from kvasir.server.http import Call, ClientGone, new_id, unless_disconnected
from kvasir.server.logprobs import LogprobWriter
from kvasir.server.response_store import EventLog, ResponseStore, StoredResponse
from kvasir.server.schema.base import CompletionTokensDetails, Usage, encode
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.responses import (
    LOGPROBS,
    CustomCallItem,
    FunctionCallItem,
    InputDetails,
    InputTokensRequest,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    PromptFields,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
)
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState
from kvasir.server.tools import responses_tools

_STATUS = {"length": "incomplete", "timeout": "incomplete", "abort": "cancelled"}
_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc", "reasoning": "rs"}
# This interface's names of what the chat template and the engine may refuse.
_FIELD_NAMES = {"messages": "input", "reasoning_effort": "reasoning", "logprobs": "top_logprobs"}


@dataclass(slots=True)
class ResponseJob:
    """A request, ready to run, and the response that it becomes."""

    request: ApiRequest
    response: ResponseReply
    items: OutputItems
    num_logprobs: int | None
    stored: StoredResponse | None
    store: ResponseStore

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ResponsesRequest) -> ResponseJob:
        store = state.responses
        model = state.check_model(body.model)
        stores = _stores(state, body)
        items = conversation(state, body, call.key)
        request = await _request(state, call, body, items)
        response = _first_state(body, request, model, stores)
        stored = None
        if stores:
            stored = StoredResponse(response, items, call.key.name, request, num_input=len(items))
            stored.log = EventLog() if body.background and body.stream else None
            store.add(stored)
        wants_logprobs = LOGPROBS in (body.include or [])
        number = (body.top_logprobs or 0) if wants_logprobs else None
        return cls(request, response, OutputItems(request.answer), number, stored, store)

    async def whole(self) -> ResponseReply:
        """Run to the end and return the response."""
        try:
            (output,) = await self.request.whole()
            (each,) = output.outputs
            for _ in self.items.add(self.request.parts.read(0, each), self.logprobs(each)):
                pass  # events, which nobody reads
            self.complete(each.finish_reason or "stop")
        except Exception as error:
            if isinstance(error, ApiError):
                self.fail(error)
            raise
        finally:
            self.ended()
        return self.response

    async def logged(self, log: EventLog) -> None:
        """Run to the end and log the events."""
        events = ResponseEvents(self)
        log.add(events.open())
        try:
            async with self.request.ending():
                await self.request.start()
                while (output := await self.request.stream.next()) is not None:
                    self.request.take(output)
                    log.add(events.write(output))
        except Exception as error:
            log.add(events.fail(error))
            raise
        finally:
            self.ended()
            log.close()

    def logprobs(self, each: CompletionOutput) -> list[Any]:
        if self.num_logprobs is None or each.logprobs is None:
            return []
        writer = LogprobWriter(self.request.engine.tokenizer, self.request.state.writes_token_ids(None))
        return list(writer.chat(each.token_ids, each.logprobs, self.num_logprobs).content)

    # ------------------------------------------------------------ its end

    def complete(self, reason: str) -> list[Event]:
        """The answer has ended; returns the last events of its items."""
        status = _STATUS.get(reason, "completed")
        events = list(self.items.finish("completed" if status == "completed" else "incomplete"))
        response, usage = self.response, self.request.usage()
        response.output = self.items.items
        response.status = status
        response.incomplete_details = {"reason": _INCOMPLETE[reason]} if reason in _INCOMPLETE else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=self.request.tokens.num_cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=_num_reasoning(usage)),
            total_tokens=usage.total_tokens,
        )
        if self.stored is not None:
            self.stored.items += self.items.as_input()
        return events

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


async def read_prompt(
    state: ServerState,
    body: PromptFields,
    items: list[dict[str, Any]],
    tools: RequestTools,
    salt: str | None = None,
    for_counting: bool = False,
) -> tuple[TokenizedPrompt, ChatTemplateFields]:
    messages = messages_of(items)
    effort = None if body.reasoning is None else body.reasoning.effort
    shown = messages if body.instructions is None else [Message(role="system", content=body.instructions), *messages]
    excluded = not tools.is_active and state.config.exclude_tools_when_tool_choice_none
    fields = ChatTemplateFields(messages=shown, chat_template_kwargs=body.chat_template_kwargs)
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    try:
        given = None if excluded else tools.shown()
        prompt = await read_chat(state, fields, salt=salt, tools=given, for_counting=for_counting, **variables)
        return prompt, fields
    except RequestError as error:
        raise as_api_error(error, _FIELD_NAMES) from error


async def _request(state: ServerState, call: Call, body: ResponsesRequest, items: list[dict[str, Any]]) -> ApiRequest:
    params = sampling_params(
        body,
        state.default_params,
        max_tokens=body.max_output_tokens or state.default_max_tokens(None),
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or []) else None,
        stream=bool(body.stream),
    )
    tools = responses_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    async with within(state, call, body.timeout):
        prompt, fields = await read_prompt(state, body, items, tools, body.cache_salt)
    shows_reasoning, budget = body.include_reasoning is not False, body.thinking_token_budget
    answer = answer_of(state, params, tools, prompt, fields, shows_reasoning, budget)
    user = body.user or body.safety_identifier
    priority, timeout, model = body.priority or 0, body.timeout, body.model
    return ApiRequest(state, call, [prompt], params, priority, timeout, user, _FIELD_NAMES, answer, model)


def _num_reasoning(usage: Usage) -> int:
    details = usage.completion_tokens_details
    return details.reasoning_tokens if isinstance(details, CompletionTokensDetails) else 0


def _stores(state: ServerState, body: ResponsesRequest) -> bool:
    """Whether this response is stored: the server stores any, and the body does not refuse."""
    if state.stores_responses:
        return body.store is not False
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            raise RequestError(f"{name} needs stored responses: {state.why_nothing_is_stored}", name)
    return False


def conversation(state: ServerState, body: ResponsesRequest | InputTokensRequest, key: ApiKey) -> list[dict[str, Any]]:
    """The items up to the previous response, and the input's. The previous instructions do not carry over, as OpenAI
    defines it."""
    given = [] if body.input is None else body.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [*_previous_items(state, body, key), *(_with_id(item) for item in items)]


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    prefix = _PREFIXES.get(str(item.get("type")), "msg")
    given = item.get("id")
    return {"type": "message", **item, "id": given if isinstance(given, str) and given else f"{prefix}_{new_id()}"}


def _previous_items(state: ServerState, body: PromptFields, key: ApiKey) -> list[dict[str, Any]]:
    if body.previous_response_id is None:
        return []
    found = state.responses.find(body.previous_response_id, key)
    if found.request is not None:
        message = "The previous response is still running: wait until it is completed."
        raise RequestError(message, "previous_response_id")
    return list(found.items)


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
        text={"format": (None if body.text is None else body.text.format) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=request.params.top_p,
        user=body.user,
    )


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


class LoggedStream(Response):
    """Sends logged events, those to come among them. Whoever leaves ends nothing."""

    def __init__(self, log: EventLog, number: int = 0) -> None:
        """`number`: the first event's sequence number."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=EVENTS)
        del self.headers["content-length"]
        self._log = log
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientGone):
            async with unless_disconnected(receive):
                async for frames in self._log.follow(self._number):
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                await send({"type": "http.response.body", "body": b""})


class ResponseEvents:
    """Writes the events of a response in OpenAI's order."""

    def __init__(self, job: ResponseJob) -> None:
        self.job = job
        self._number = 0
        self._is_open = False  # the first events are written

    def write(self, output: RequestOutput) -> bytes:
        job = self.job
        job.request.check(output)
        (each,) = output.outputs
        frames = self.open()
        for kind, fields in job.items.add(job.request.parts.read(0, each), job.logprobs(each)):
            frames += self._event(kind, **fields)
        if each.finish_reason is not None:
            for kind, fields in job.complete(each.finish_reason):
                frames += self._event(kind, **fields)
            job.ended()
            frames += self._event(job.response.status, response=job.response)
        return frames

    def open(self) -> bytes:
        """The first events, unless they are written already."""
        if self._is_open:
            return b""
        self._is_open = True
        response = self.job.response
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def finish(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        self.job.fail(as_api_error(error))
        return self._event("failed", response=self.job.response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"


Event = tuple[str, dict[str, Any]]  # its type without "response.", and its fields


class OutputItems:
    """The items of one response, while its answer comes."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.items: list[OutputItem] = []
        self._answer = answer
        self._is_open = False  # the last item still grows

    def add(self, parts: Sequence[OutputPart], logprobs: list[Any]) -> Iterator[Event]:
        """Add parts, and log-probabilities of the new tokens; yield what happens."""
        is_plain = self._answer.is_plain
        if logprobs and is_plain and not any(isinstance(part, Content) for part in parts):
            parts = [*parts, Content("")]
        for part in parts:
            if isinstance(part, Content):
                yield from self._text(part.text, logprobs)
                logprobs = []
            elif isinstance(part, Reasoning):
                yield from self._reason(part.text)
            elif isinstance(part, ToolCall):
                yield from self.close()
                yield from self._begin(self._call(part))
            else:
                yield from self._arguments(part.text)

    def finish(self, status: str) -> Iterator[Event]:
        """The answer has ended. It always has an item."""
        if not self.items:
            yield from self._text("", [])
        yield from self.close(status)

    # ------------------------------------------------------------ items grow

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self.items.append(item)
        self._is_open = True
        shown: dict[str, Any] = {"content": []} if isinstance(item, OutputMessage | ReasoningItem) else {}
        yield "output_item.added", {"output_index": self._index, "item": _with(item, **shown)}
        if isinstance(item, OutputMessage | ReasoningItem):
            yield "content_part.added", {**self._place, "part": _with(item.content[0])}

    def _text(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            yield from self.close()
            part = OutputText(text="", annotations=[], logprobs=[])
            yield from self._begin(OutputMessage(id=f"msg_{new_id()}", status="in_progress", content=[part]))
        item = self.items[-1]
        assert isinstance(item, OutputMessage), "a message is open"
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        if text or logprobs:
            yield "output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def _reason(self, text: str) -> Iterator[Event]:
        if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
            yield from self.close()
            item = ReasoningItem(id=f"rs_{new_id()}", content=[ReasoningText(text="")], status="in_progress")
            yield from self._begin(item)
        found = self.items[-1]
        assert isinstance(found, ReasoningItem), "reasoning is open"
        found.content[0].text += text
        yield "reasoning_text.delta", {**self._place, "delta": text}

    def _call(self, part: ToolCall) -> FunctionCallItem | CustomCallItem:
        if self._answer.is_custom(part.name):
            return CustomCallItem(id=f"ctc_{new_id()}", call_id=part.id, name=part.name, input="", status="in_progress")
        return FunctionCallItem(
            id=f"fc_{new_id()}", call_id=part.id, name=part.name, arguments="", status="in_progress"
        )

    def _arguments(self, text: str) -> Iterator[Event]:
        item = self.items[-1]
        if isinstance(item, CustomCallItem):
            item.input += text
            yield "custom_tool_call_input.delta", {**self._item, "delta": text}
        elif isinstance(item, FunctionCallItem):
            item.arguments += text
            yield "function_call_arguments.delta", {**self._item, "delta": text}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The open item is done."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open = False
        item.status = status
        if isinstance(item, OutputMessage):
            part = item.content[0]
            yield "output_text.done", {**self._place, "text": part.text, "logprobs": part.logprobs}
            yield "content_part.done", {**self._place, "part": part}
        elif isinstance(item, ReasoningItem):
            yield "reasoning_text.done", {**self._place, "text": item.content[0].text}
            yield "content_part.done", {**self._place, "part": item.content[0]}
        elif isinstance(item, CustomCallItem):
            yield "custom_tool_call_input.done", {**self._item, "input": item.input}
        else:
            yield "function_call_arguments.done", {**self._item, "arguments": item.arguments, "name": item.name}
        yield "output_item.done", {"output_index": self._index, "item": item}

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _item(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": self._index}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item, "content_index": 0}

    # ------------------------------------------------------------ as input of the next turn

    def as_input(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for item in self.items:
            if isinstance(item, OutputMessage):
                text = item.content[0].text
                found.append({"type": "message", "id": item.id, "role": "assistant", "content": text})
            elif isinstance(item, ReasoningItem):
                content = [{"type": "reasoning_text", "text": item.content[0].text}]
                found.append({"type": "reasoning", "id": item.id, "summary": [], "content": content})
            else:
                found.append(_with(item))
        return found


def _with(struct: Any, **changed: Any) -> dict[str, Any]:
    """A struct as it is now: events are encoded later than the struct changes."""
    return {**msgspec.to_builtins(struct), **changed}


# ---------------------------------------------------------------- items of the input


def messages_of(items: list[dict[str, Any]]) -> list[Message]:
    """The messages of a conversation. Reasoning, a text and calls in a row are one message of the assistant's."""
    made: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = _joined(thought, _thought(item))
            continue
        message = _message(item, str(kind))
        if message["role"] == "assistant":
            last = made[-1] if made and made[-1]["role"] == "assistant" else None
            if last is not None and message.get("tool_calls"):
                last.setdefault("tool_calls", []).extend(message["tool_calls"])  # there may be thousands in a row
                if thought:  # between the text and the call
                    last["reasoning_content"] = _joined(last.get("reasoning_content", ""), thought)
                    thought = ""
                continue
            if thought:
                message["reasoning_content"] = thought
        thought = ""
        made.append(message)
    return [Message.model_validate(message) for message in made]


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def as_listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item as OpenAI lists it: with its status, and a message's text as a content part."""
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
    return {"status": "completed", **item, **({} if content is None else {"content": content})}


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def _message(item: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "message":
        return _plain(item)
    if kind in _CALLS:
        given: Any = _text(item, _CALLS[kind])
        function = {"name": _text(item, "name"), "arguments": given if kind == "function_call" else {"input": given}}
        call = {"id": _text(item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in _OUTPUTS:
        return {"role": "tool", "content": _output(item), "tool_call_id": _text(item, "call_id")}
    known = ", ".join(("message", "reasoning", *_CALLS, *_OUTPUTS))
    raise RequestError(f"Input items of type {kind!r:.80} are not supported; use {known}.", "input")


def _thought(item: dict[str, Any]) -> str:
    found = []
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list):
            found = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if found:
            break
    return "\n".join(found)


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise RequestError("A message in input must have a role and content.", "input")
    if isinstance(content, list) and not all(isinstance(part, str | dict) for part in content):
        raise RequestError("A message's content must be a string or a list of content parts.", "input")
    message = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
    calls = message.pop("tool_calls", None)
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise RequestError("tool_calls of a message in input must be a list.", "input")
    return {**message, "tool_calls": [*calls]}  # a list of its own, to which calls that follow are added


def _output(item: dict[str, Any]) -> str | list[str | dict[str, Any]]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, str | dict) for part in output):
        return output
    raise RequestError(f"A {item['type']} must have output, a string.", "input")


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"An item of type {item['type']!r} must have {name}, a string.", "input")
    return value
