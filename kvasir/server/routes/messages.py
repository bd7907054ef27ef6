"""/v1/messages: Anthropic's interface, with count_tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import Content, OutputPart, Reasoning, ToolCall, calls_of, joined
from kvasir.sampling_params import SamplingParams
from kvasir.server.answers import RequestTools
from kvasir.server.api_request import ApiRequest, answer_of, read_chat, within
from kvasir.server.errors import EVENTS, answers, anthropic_body, as_api_error, timed_out
from kvasir.server.event_stream import EventStream
from kvasir.server.http import Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.schema.base import Body, BoundedModel, Reply, encode, example, invalid, refused
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.field_docs import FIELD_DOCS
from kvasir.server.schema.sampling import CacheSalt, ConstraintFields, TemplateVariables, sampling_params
from kvasir.server.state import ServerState, State
from kvasir.server.tools import anthropic_tools


class AnthropicMessage(BoundedModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"] = Field(description=FIELD_DOCS["role"])
    content: str | list[dict[str, Any]] = Field(description=FIELD_DOCS["content"])


class Thinking(Body):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Whether the model reasons.")
    budget_tokens: int | None = Field(default=None, ge=0, description="Most tokens of reasoning.")
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: do not return the reasoning."
    )


class CountTokensRequest(Body):
    model_config = example(model="MODEL", messages=[{"role": "user", "content": "What is the capital of France?"}])

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = Field(default=None, description="Whether the model reasons, and how long.")
    output_config: dict[str, Any] | None = Field(
        default=None,
        description="format: the form of the output, of type json_schema with a schema. effort: passed to chat "
        "templates that read reasoning_effort.",
    )
    output_format: dict[str, Any] | None = Field(default=None, description="Older form of output_config.format.")
    cache_control: Any = refused("prefixes are cached without marks.", {"type": "ephemeral"})
    context_management: Any = refused("the server does not edit conversations.")
    mcp_servers: Any = refused("the server calls no other servers.", [])


class MessagesRequest(CountTokensRequest, ConstraintFields):
    model_config = example(
        model="MODEL", messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=32
    )

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = Field(default=None, description="user_id is shown in the server's log.")
    service_tier: Any = refused("there is only one tier.", "auto", "standard_only")
    container: Any = refused("the server runs no code.")
    inference_geo: Any = refused("the server runs in one place.")
    speed: Any = refused("there is only one speed.", "standard")
    response_format: Any = refused("say it as output_config.format.", {"type": "text"})
    # not in Anthropic's interface
    timeout: float | None = Field(default=None, gt=0)
    priority: int | None = None
    cache_salt: CacheSalt | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _known_metadata(self) -> MessagesRequest:
        for name in self.metadata or {}:
            if name != "user_id":
                raise invalid("metadata", f"metadata can have user_id only, not {name!r}.")
        return self


class TextBlock(Reply, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Reply, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # reasoning is not signed here


class ToolUseBlock(Reply, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


class MessageUsage(Reply, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageReply(Reply, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensReply(Reply, kw_only=True):
    input_tokens: int


router = APIRouter(route_class=StrictRoute, tags=["Anthropic"])


@router.post(
    "/v1/messages",
    responses=answers(
        MessageReply, description="The message; with `stream`, events.", stream=EVENTS, errors="MessagesErrorReply"
    ),
)
async def create_message(body: MessagesRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation."""
    job = await unless_gone(request, MessageJob.make(state, call, body))
    if body.stream:
        return EventStream(job.request, job)
    return reply(await unless_gone(request, job.whole()))


@router.post("/v1/messages/count_tokens", responses=answers(CountTokensReply, errors="MessagesErrorReply"))
async def count_tokens(body: CountTokensRequest, request: Request, state: State) -> Response:
    """Count the tokens of a conversation with the chat template applied."""
    tools = anthropic_tools(body.tools, body.tool_choice)
    prompt, _ = await unless_gone(request, _prompt(state, body, tools, for_counting=True))
    return reply(CountTokensReply(input_tokens=len(prompt.token_ids)))


@dataclass(slots=True)
class MessageJob:
    """A request, ready to run; it writes the message, whole or as events."""

    request: ApiRequest
    model: str
    id: str
    is_open: bool = False  # the first events are written
    index: int = -1  # of the block that is open, or was last
    kind: str = ""  # of the block that is open
    called: bool = False  # there are calls

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: MessagesRequest) -> MessageJob:
        params = _params(state, body)
        tools = anthropic_tools(body.tools, body.tool_choice)
        async with within(state, call, body.timeout):
            prompt, fields = await _prompt(state, body, tools)
        thinking = body.thinking
        if thinking is not None and thinking.type == "enabled" and state.formats.of().reasoning is None:
            message = "thinking is enabled, but this model has no reasoning that the server knows: leave thinking out."
            raise RequestError(message, "thinking")
        hides = thinking is not None and (thinking.display == "omitted" or thinking.type == "disabled")
        budget = None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens
        answer = answer_of(state, params, tools, prompt, fields, not hides, budget)
        user = (body.metadata or {}).get("user_id")
        name = None if user is None else str(user)
        names = {"stop": "stop_sequences"}
        priority, timeout = body.priority or 0, body.timeout
        request = ApiRequest(state, call, [prompt], params, priority, timeout, name, names, answer, body.model)
        return cls(request, body.model, f"msg_{call.id}")

    async def whole(self) -> MessageReply:
        (output,) = await self.request.whole()
        (each,) = output.outputs
        self._check_time(each)
        made = self._message(_blocks(self.request.parts.read(0, each)))
        called = any(isinstance(block, ToolUseBlock) for block in made.content)
        made.stop_reason, made.stop_sequence = _stop(each, called)
        return made

    def _message(self, content: list[TextBlock | ThinkingBlock | ToolUseBlock]) -> MessageReply:
        return MessageReply(id=self.id, model=self.model, content=content, usage=self._usage())

    def _usage(self) -> MessageUsage:
        tokens = self.request.tokens
        return MessageUsage(
            input_tokens=tokens.num_prompt - tokens.num_cached,  # Anthropic counts cached tokens apart
            cache_read_input_tokens=tokens.num_cached,
            output_tokens=tokens.num_generated,
        )

    def _check_time(self, each: CompletionOutput) -> None:
        if each.finish_reason == "timeout":  # Anthropic has no stop_reason for it
            raise timed_out(self.request.timeout)

    # ------------------------------------------------------------ the stream

    def write(self, output: RequestOutput) -> bytes:
        self.request.check(output)
        (each,) = output.outputs
        self._check_time(each)
        frames = b"" if self.is_open else self._opening()
        self.is_open = True
        for part in self.request.parts.read(0, each):
            if isinstance(part, Content):
                frames += self._in_block("text", TextBlock(text=""))
                frames += _before(self.index) + encode(part.text) + _AFTER
            elif isinstance(part, Reasoning):
                frames += self._in_block("thinking", ThinkingBlock(thinking=""))
                frames += self._delta({"type": "thinking_delta", "thinking": part.text})
            elif isinstance(part, ToolCall):
                self.called = True
                frames += self._end_block() + self._in_block(
                    part.id, ToolUseBlock(id=part.id, name=part.name, input={})
                )
            else:
                frames += self._delta({"type": "input_json_delta", "partial_json": part.text})
        return frames if each.finish_reason is None else frames + self._closing(each)

    def _in_block(self, kind: str, start: TextBlock | ThinkingBlock | ToolUseBlock) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if self.kind == kind:
            return b""
        frames = self._end_block()
        self.kind, self.index = kind, self.index + 1
        body = {"type": "content_block_start", "index": self.index, "content_block": start}
        return frames + _event("content_block_start", body)

    def _end_block(self) -> bytes:
        if not self.kind:
            return b""
        frames = b""
        if self.kind == "thinking":
            frames = self._delta({"type": "signature_delta", "signature": ""})
        self.kind = ""
        return frames + _event("content_block_stop", {"type": "content_block_stop", "index": self.index})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": delta})

    def finish(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return _event("error", anthropic_body(as_api_error(error), self.request.call.id))

    def _opening(self) -> bytes:
        start = self._message([])
        start.usage.output_tokens = 0
        return _event("message_start", {"type": "message_start", "message": start}) + _event("ping", {"type": "ping"})

    def _closing(self, each: CompletionOutput) -> bytes:
        frames = b"" if self.index >= 0 else self._in_block("text", TextBlock(text=""))  # a message is never empty
        frames += self._end_block()
        reason, sequence = _stop(each, self.called)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return frames + _event("message_delta", end) + _event("message_stop", {"type": "message_stop"})


def _event(kind: str, body: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"


# The bytes of a text delta's event around its text. Tokens come often, so these are encoded once.
_AFTER = b"}}\n\n"


@cache
def _before(index: int) -> bytes:
    body = {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": "\x00"}}
    before, after = _event("content_block_delta", body).split(encode("\x00"))
    assert after == _AFTER, "what follows a text does not depend on the block"
    return before


def _blocks(parts: Sequence[OutputPart]) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    """The content of a whole message."""
    made: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    calls = iter(calls_of(parts))
    for part in joined(parts):
        if isinstance(part, Content):
            made.append(TextBlock(text=part.text))
        elif isinstance(part, Reasoning):
            made.append(ThinkingBlock(thinking=part.text))
        elif isinstance(part, ToolCall):
            call = next(calls)
            made.append(ToolUseBlock(id=call.id, name=call.name, input=_input(call.arguments)))
    return made or [TextBlock(text="")]


def _input(arguments: str) -> Any:
    """The arguments as an object. Text that is none, because it was cut short, is kept under a name of ours."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return found if isinstance(found, dict) else {"arguments": found}


def _stop(each: CompletionOutput, called: bool) -> tuple[str, str | None]:
    if each.finish_reason == "length":
        return "max_tokens", None
    if called and each.finish_reason == "stop":
        return "tool_use", None
    if isinstance(each.stop_reason, str) and each.finish_reason == "stop":
        return "stop_sequence", each.stop_reason
    return "end_turn", None


async def _prompt(
    state: ServerState, body: CountTokensRequest, tools: RequestTools, for_counting: bool = False
) -> tuple[TokenizedPrompt, ChatTemplateFields]:
    state.check_model(body.model)
    messages, continues = conversation(body)
    given: dict[str, Any] = {**(getattr(body, "chat_template_kwargs", None) or {})}
    if body.thinking is not None:  # the names that templates have for it
        enabled = body.thinking.type != "disabled"
        given = {"enable_thinking": enabled, "thinking": enabled, **given}
    fields = ChatTemplateFields(messages=messages, continue_final_message=continues, chat_template_kwargs=given)
    excluded = not tools.is_active and state.config.exclude_tools_when_tool_choice_none
    shown = None if excluded else tools.shown()
    effort = _effort(body.output_config)
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    salt = getattr(body, "cache_salt", None)
    try:
        prompt = await read_chat(state, fields, salt=salt, tools=shown, for_counting=for_counting, **variables)
        return prompt, fields
    except PromptTooLongError as error:
        raise PromptTooLongError(_too_long(state, error), "messages", error.num_tokens) from error
    except RequestError as error:
        raise as_api_error(error, {"reasoning_effort": "output_config.effort"}) from error


def _effort(config: Mapping[str, Any] | None) -> str | None:
    effort = None if config is None else config.get("effort")
    if not isinstance(effort, str | None):
        raise RequestError("output_config.effort must be a text, such as 'low' or 'high'.", "output_config")
    return effort


def _too_long(state: ServerState, error: PromptTooLongError) -> str:
    """Anthropic's words, by which its clients know that they should shorten the conversation."""
    if error.num_tokens is None:
        return f"prompt is too long: {error}"
    most = state.engine.input_processor.prompts.max_tokens
    return f"prompt is too long: {error.num_tokens} tokens > {most} maximum. {error}"


def _params(state: ServerState, body: MessagesRequest) -> SamplingParams:
    params = sampling_params(
        body, state.default_params, max_tokens=body.max_tokens, logprobs=None, stream=bool(body.stream)
    )
    params.stop = body.stop_sequences or []
    return params


# ---------------------------------------------------------------- conversations as chat templates read them

# Allowed entries of blocks by type. cache_control needs no action: all prefixes are cached.
_KEYS = {
    "text": {"type", "text", "cache_control"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller"},
    "thinking": {"type", "thinking", "signature", "cache_control"},
    "redacted_thinking": {"type", "data", "cache_control"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
}


def conversation(body: CountTokensRequest) -> tuple[list[Message], bool]:
    """The messages for the chat template, and whether the model continues the last one, an assistant's."""
    found: list[Message] = []
    if body.system:
        found.append(Message(role="system", content=_text(body.system, "system")))
    for message in body.messages:
        found += _messages(message)
    return found, body.messages[-1].role == "assistant"


def _messages(message: AnthropicMessage) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results = [part for part in message.content if part.get("type") == "tool_result"]
    calls = [part for part in message.content if part.get("type") == "tool_use"]
    thoughts = [part for part in message.content if part.get("type") in ("thinking", "redacted_thinking")]
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [part for part in message.content if part.get("type") not in others]
    found = [_result(part) for part in results]
    if rest or calls or not results:
        made: dict[str, Any] = {"role": message.role, "content": _text(rest, "messages") if rest else ""}
        if calls:
            made["tool_calls"] = [_call(part) for part in calls]
        if text := _thought(thoughts):
            made["reasoning_content"] = text
        found.append(Message(**made))
    return found


def _thought(blocks: list[dict[str, Any]]) -> str:
    """The text of thinking blocks. Redacted ones are of other servers, and say nothing."""
    for block in blocks:
        _check_keys(block, "messages")
    return "\n".join(str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking")


def _result(part: dict[str, Any]) -> Message:
    _check_keys(part, "messages")
    text = _text(part.get("content") or "", "messages")
    failed = part.get("is_error")
    if not isinstance(failed, bool | None):
        raise RequestError("is_error of a tool_result must be true or false.", "messages")
    if failed:
        text = f"Error: {text}"  # templates have no place for the flag, so the text shows it
    made = {"role": "tool", "content": text, "tool_call_id": _given_text(part, "tool_use_id")}
    return Message.model_validate(made)


def _call(part: dict[str, Any]) -> dict[str, Any]:
    _check_keys(part, "messages")
    given = part.get("input", {})
    if not isinstance(given, dict):
        raise RequestError("input of a tool_use must be an object, the tool's arguments.", "messages")
    function = {"name": _given_text(part, "name"), "arguments": json.dumps(given)}
    return {"id": _given_text(part, "id"), "type": "function", "function": function}


def _given_text(part: dict[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"A content block of type {part['type']!r} must have {name}, a text.", "messages")
    return value


def _text(content: object, where: str) -> str:
    """The text of content: a string, or blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content must be a string or a list of content blocks.", where)
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise RequestError(f"Content blocks of type {kind!r} are not supported: this model takes text only.", where)
        _check_keys(block, where)
        texts.append(block["text"])
    return "\n".join(texts)


def _check_keys(block: dict[str, Any], where: str) -> None:
    """Refuse entries of a block that would be ignored, unless they are null or an empty list."""
    for name, value in block.items():
        if name not in _KEYS[block["type"]] and value not in (None, []):
            raise RequestError(f"{name} is not supported in a content block of type {block['type']!r}.", where)
