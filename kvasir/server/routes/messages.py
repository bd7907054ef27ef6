"""/v1/messages: Anthropic's interface, with count_tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import content_of
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_request import ApiRequest, read_chat
from kvasir.server.errors import anthropic_body, as_api_error, timed_out
from kvasir.server.event_stream import EventStream
from kvasir.server.http import Call, StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import ChatTemplateFields, Message
from kvasir.server.schema.messages import (
    AnthropicMessage,
    CountTokensReply,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    TextBlock,
)
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["Anthropic"])


@router.post("/v1/messages", responses=answers(MessageReply, "The message; with `stream`, events."))
async def create_message(body: MessagesRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation."""
    job = await unless_gone(request, MessageJob.make(state, call, body))
    if body.stream:
        return EventStream(job.request, job)
    return reply(await unless_gone(request, job.whole()))


@router.post("/v1/messages/count_tokens", responses=answers(CountTokensReply))
async def count_tokens(body: CountTokensRequest, request: Request, state: State) -> Response:
    """Count the tokens of a conversation with the chat template applied."""
    prompt = await unless_gone(request, _prompt(state, body))
    return reply(CountTokensReply(input_tokens=len(prompt.token_ids)))


@dataclass(slots=True)
class MessageJob:
    """A request, ready to run; it writes the message, whole or as events."""

    request: ApiRequest
    model: str
    id: str
    is_open: bool = False  # the first events are written

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: MessagesRequest) -> MessageJob:
        prompt = await _prompt(state, body)
        user = (body.metadata or {}).get("user_id")
        name = None if user is None else str(user)
        names = {"stop": "stop_sequences"}
        params = _params(state, body)
        request = ApiRequest(state, call, [prompt], params, body.priority or 0, body.timeout, name, names)
        return cls(request, body.model, f"msg_{call.id}")

    async def whole(self) -> MessageReply:
        (output,) = await self.request.whole()
        self.request.check(output)
        (each,) = output.outputs
        self._check_time(each)
        made = self._message([TextBlock(text=content_of(self.request.parts.read(0, each)))])
        made.stop_reason, made.stop_sequence = _stop(each)
        return made

    def _message(self, content: list[TextBlock]) -> MessageReply:
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
            frames += _BEFORE + encode(part.text) + _AFTER
        return frames if each.finish_reason is None else frames + self._closing(each)

    def finish(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return _event("error", anthropic_body(as_api_error(error), self.request.call.id))

    def _opening(self) -> bytes:
        start = self._message([])
        start.usage.output_tokens = 0
        block = {"type": "content_block_start", "index": 0, "content_block": TextBlock(text="")}
        return (
            _event("message_start", {"type": "message_start", "message": start})
            + _event("content_block_start", block)
            + _event("ping", {"type": "ping"})
        )

    def _closing(self, each: CompletionOutput) -> bytes:
        reason, sequence = _stop(each)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return (
            _event("content_block_stop", {"type": "content_block_stop", "index": 0})
            + _event("message_delta", end)
            + _event("message_stop", {"type": "message_stop"})
        )


def _event(kind: str, body: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"


# The bytes of a text delta's event around its text. Tokens come often, so these are encoded once.
_DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "\x00"}}
_BEFORE, _AFTER = _event("content_block_delta", _DELTA).split(encode("\x00"))


def _stop(each: CompletionOutput) -> tuple[str, str | None]:
    if each.finish_reason == "length":
        return "max_tokens", None
    if isinstance(each.stop_reason, str) and each.finish_reason == "stop":
        return "stop_sequence", each.stop_reason
    return "end_turn", None


async def _prompt(state: ServerState, body: CountTokensRequest) -> TokenizedPrompt:
    state.check_model(body.model)
    messages, continues = conversation(body)
    fields = ChatTemplateFields(
        messages=messages,
        tools=None if state.config.exclude_tools_when_tool_choice_none else body.tools,
        continue_final_message=continues,
        chat_template_kwargs=getattr(body, "chat_template_kwargs", None),
    )
    return await read_chat(state, fields, salt=getattr(body, "cache_salt", None))


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
    "tool_use": {"type", "id", "name", "input", "cache_control"},
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
    rest = [part for part in message.content if part.get("type") not in ("tool_result", "tool_use")]
    found = [_result(part) for part in results]
    if rest or calls or not results:
        made: dict[str, Any] = {"role": message.role, "content": _text(rest, "messages") if rest else ""}
        if calls:
            made["tool_calls"] = [_call(part) for part in calls]
        found.append(Message(**made))
    return found


def _result(part: dict[str, Any]) -> Message:
    _check_keys(part, "messages")
    text = _text(part.get("content") or "", "messages")
    failed = part.get("is_error")
    if not isinstance(failed, bool | None):
        raise RequestError("is_error of a tool_result must be true or false.", "messages")
    if failed:
        text = f"Error: {text}"  # templates have no place for the flag, so the text shows it
    made = {"role": "tool", "content": text, "tool_call_id": str(part.get("tool_use_id", ""))}
    return Message.model_validate(made)


def _call(part: dict[str, Any]) -> dict[str, Any]:
    _check_keys(part, "messages")
    function = {"name": str(part.get("name", "")), "arguments": json.dumps(part.get("input", {}))}
    return {"id": str(part.get("id", "")), "type": "function", "function": function}


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
