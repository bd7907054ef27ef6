"""/v1/chat/completions over HTTP; websocket.py has the same over a WebSocket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import Content, OutputPart, content_of
from kvasir.server.api_request import ApiRequest, read_chat
from kvasir.server.event_stream import EventStream, OpenAIEvents
from kvasir.server.http import FINGERPRINT, Call, StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.schema.base import encode
from kvasir.server.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
    ReplyMessage,
)
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, "A reply; with `stream`, events of chunks."))
async def create_chat_completion(body: ChatRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation."""
    chat = await unless_gone(request, ChatJob.make(state, call, body))
    if body.stream:
        return EventStream(chat.request, OpenAIEvents(chat.chunks()))
    return reply(await unless_gone(request, chat.whole()))


@dataclass(slots=True)
class ChatJob:
    """A chat request, ready to run."""

    body: ChatRequest
    request: ApiRequest
    model: str
    id: str
    role: str
    echo: str

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ChatRequest) -> ChatJob:
        call.take_id(body.request_id)
        model = state.check_model(body.model)
        variables = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        if state.config.exclude_tools_when_tool_choice_none:
            body.tools = None
        prompt = await read_chat(state, body, body.truncate_prompt_tokens, body.cache_salt, **variables)
        params = sampling_params(
            body,
            state.default_params,
            max_tokens=body.max_completion_tokens or body.max_tokens or state.default_max_tokens(None),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            stream=bool(body.stream),
        )
        user = body.user or body.safety_identifier
        names = {"logprobs": "top_logprobs"} if body.top_logprobs else {}
        request = ApiRequest(state, call, [prompt], params, body.priority or 0, body.timeout, user, names)
        opens = body.add_generation_prompt is not False and not body.continue_final_message
        role = state.config.response_role if opens else body.messages[-1].role
        return cls(body, request, model, f"chatcmpl-{call.id}", role, _echoed(body, role))

    @property
    def writer(self) -> LogprobWriter:
        as_ids, named = bool(self.body.return_tokens_as_token_ids), self.body.logprob_token_ids
        return LogprobWriter(self.request.engine.tokenizer, as_ids, named)

    def chunks(self) -> ChatChunks:
        asked = self.body.stream_options
        forced = self.request.state.config.enable_force_include_usage
        options = ChunkOptions(
            usage=forced or (asked is not None and asked.include_usage),
            continuous_usage=asked is not None and asked.continuous_usage_stats,
            token_ids=bool(self.body.return_token_ids),
            num_top_logprobs=(self.body.top_logprobs or 0) if self.body.logprobs else None,
            echo=self.echo,
        )
        logprobs = self.writer if self.body.logprobs else None
        return ChatChunks(self.request, self.id, int(time.time()), self.model, self.role, options, logprobs)

    async def whole(self) -> ChatCompletion:
        (output,) = await self.request.whole()
        self.request.check(output)
        made = ChatCompletion(
            id=self.id,
            created=int(time.time()),
            model=self.model,
            choices=[self._choice(each) for each in output.outputs],
            usage=self.request.usage(),
            system_fingerprint=FINGERPRINT,
        )
        if self.body.return_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return made

    def _choice(self, each: CompletionOutput) -> ChatChoice:
        parts = self.request.parts.read(each.index, each)
        choice = ChatChoice(
            index=each.index,
            message=ReplyMessage(role=self.role, content=self.echo + content_of(parts)),
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
        )
        if each.logprobs is not None and self.body.logprobs:
            choice.logprobs = self.writer.chat(each.token_ids, each.logprobs, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            choice.token_ids = each.token_ids
        return choice


def _echoed(body: ChatRequest, role: str) -> str:
    """The last message's text, if echo asks for it."""
    if not body.echo:
        return ""
    last = body.messages[-1]
    if last.role != role or last.content is None:
        message = f"echo begins the reply with the last message, which must have content and be of the role {role!r}."
        raise RequestError(message, "echo")
    if isinstance(last.content, str):
        return last.content
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in last.content)


# ---------------------------------------------------------------- the stream


@dataclass(slots=True)
class ChunkOptions:
    """What chunks have besides parts of the answer."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    num_top_logprobs: int | None = None  # None: no log-probabilities
    echo: str = ""  # every choice begins with this

    @property
    def text_only(self) -> bool:
        return not self.token_ids and not self.continuous_usage and self.num_top_logprobs is None


class ChatChunks:
    """Writes the chunks of one reply.

    A chunk with some content and nothing else is the commonest, so it is put together from encoded bytes. Tests hold it
    equal to the encoded struct.
    """

    def __init__(
        self,
        request: ApiRequest,
        id: str,
        created: int,
        model: str,
        role: str,
        options: ChunkOptions,
        logprobs: LogprobWriter | None = None,
    ) -> None:
        self.request = request
        self.options = options
        self.role = role
        self._base: dict[str, Any] = {"id": id, "created": created, "model": model, "system_fingerprint": FINGERPRINT}
        self._logprobs = logprobs
        self._text_only = options.text_only
        self._read = request.parts.read
        self._around: dict[int, tuple[bytes, bytes]] = {}  # bytes before and after a content chunk's text, by choice

    def payloads(self, output: RequestOutput) -> Sequence[bytes]:
        each = output.outputs[0]
        around = self._around.get(each.index)
        if around is None or not self._text_only or len(output.outputs) > 1 or each.finish_reason is not None:
            return self._chunks(output)
        parts = self._read(each.index, each)
        if len(parts) == 1 and type(parts[0]) is Content:
            return (around[0] + encode(parts[0].text) + around[1],)
        return (encode(self._chunk(ChunkChoice(index=each.index, delta=_delta(parts)))),) if parts else ()

    def last_payloads(self) -> Sequence[bytes]:
        if not self.options.usage:
            return ()
        return (encode(ChatChunk(**self._base, choices=[], usage=self.request.usage())),)

    def _chunks(self, output: RequestOutput) -> list[bytes]:
        self.request.check(output)
        made: list[bytes] = []
        for each in output.outputs:
            parts = self._read(each.index, each)
            if each.index not in self._around:
                made += self._first(each.index, output)
            if parts or (each.token_ids and not self._text_only):
                made.append(encode(self._chunk(self._choice(each, parts))))
            if each.finish_reason is not None:
                end = ChunkChoice(index=each.index, delta=Delta(), finish_reason=each.finish_reason)
                end.stop_reason = each.stop_reason
                made.append(encode(self._chunk(end)))
        return made

    def _first(self, index: int, output: RequestOutput) -> list[bytes]:
        """The role, and with the first choice what was asked about the prompt."""
        chunk = self._chunk(ChunkChoice(index=index, delta=Delta(role=self.role, content="")))
        if not self._around:
            if self.options.token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            if output.prompt_logprobs is not None:
                chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        self._prepare(index)
        made = [encode(chunk)]
        if self.options.echo:
            made.append(encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=self.options.echo)))))
        return made

    def _prepare(self, index: int) -> None:
        mark = "\x00"
        whole = encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=mark))))
        before, after = whole.split(encode(mark))
        self._around[index] = before, after

    def _choice(self, each: CompletionOutput, parts: Sequence[OutputPart]) -> ChunkChoice:
        choice = ChunkChoice(index=each.index, delta=_delta(parts))
        if self.options.token_ids:
            choice.token_ids = each.token_ids
        num = self.options.num_top_logprobs
        if num is not None and each.logprobs is not None and self._logprobs is not None:
            choice.logprobs = self._logprobs.chat(each.token_ids, each.logprobs, num)
        return choice

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._base, choices=[choice])
        if self.options.continuous_usage:
            chunk.usage = self.request.usage()
        elif self.options.usage:
            chunk.usage = None  # as OpenAI announces usage that comes later
        else:
            chunk.usage = UNSET
        return chunk


def _delta(parts: Sequence[OutputPart]) -> Delta:
    return Delta(content=content_of(parts))
