"""/v1/chat/completions over HTTP; websocket.py has the same over a WebSocket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import Content, OutputPart, Reasoning, ToolCall, calls_of, content_of, reasoning_of
from kvasir.sampling_params import SamplingParams
from kvasir.server.answers import NO_TOOLS, ChatAnswer, RequestTools
from kvasir.server.api_request import ApiRequest, answer_of, read_chat, within
from kvasir.server.errors import EVENTS, answers
from kvasir.server.event_stream import EventStream, OpenAIEvents, PayloadWriter
from kvasir.server.http import FINGERPRINT, Call, StrictRoute, TheCall, reply, unless_gone
from kvasir.server.large_bodies import check_copies, write_reply
from kvasir.server.limits import check_limits
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.response_store import StoredCompletion, StoringChunks, add_text
from kvasir.server.schema.base import Usage, encode
from kvasir.server.schema.chat import (
    CalledCustom,
    CalledFunction,
    ChatBatchRequest,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
    ReplyCall,
    ReplyMessage,
)
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState, State
from kvasir.server.tools import chat_tools

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, description="A reply; with `stream`, events of chunks.", stream=EVENTS),
)
async def create_chat_completion(body: ChatRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation."""
    chat = await unless_gone(request, ChatJob.make(state, call, body))
    if body.stream:
        return EventStream(chat.request, OpenAIEvents(chat.chunks()))
    return reply(await unless_gone(request, chat.whole()))


@router.post("/v1/chat/completions/batch", responses=answers(ChatCompletion))
async def create_chat_batch(body: ChatBatchRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer several conversations at once: the reply has one choice for each, in their order."""
    check_limits(SamplingParams(), len(body.messages), state.config.max_choices)  # before any of them is rendered
    first, *others = await unless_gone(request, ChatJob.make_all(state, call, body.conversations()))
    return reply(await unless_gone(request, first.whole_with(others)))


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
        (job,) = await cls.make_all(state, call, [body])
        return job

    @classmethod
    async def make_all(cls, state: ServerState, call: Call, bodies: Sequence[ChatRequest]) -> list[ChatJob]:
        """One job for each conversation. They share a request, so `bodies` differ in nothing but their messages."""
        body = bodies[0]
        if body.store and not state.stores_responses:
            raise RequestError(f"Chat completions are not stored: {state.why_nothing_is_stored}", "store")
        call.take_id(body.request_id)
        model = state.check_model(body.model)
        params = sampling_params(
            body,
            state.default_params,
            max_tokens=body.max_completion_tokens or body.max_tokens or state.default_max_tokens(None),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            stream=bool(body.stream),
        )
        has_tools = body.tools or body.tool_choice is not None
        tools = chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls) if has_tools else NO_TOOLS
        async with within(state, call, body.timeout):
            prompts = []
            for each in bodies:
                prompts.append(await _prompt(state, each, tools))
                if len(bodies) > 1:
                    await asyncio.sleep(0)  # others may go on: a short prompt is rendered without a pause
        shows_reasoning, budget = body.include_reasoning is not False, body.thinking_token_budget
        answer = answer_of(state, params, tools, prompts[0], body, shows_reasoning, budget)
        user = body.user or body.safety_identifier
        names = {"logprobs": "top_logprobs"} if body.top_logprobs else {}
        priority, timeout = body.priority or 0, body.timeout
        request = ApiRequest(state, call, prompts, params, priority, timeout, user, names, answer, model)
        opens = body.add_generation_prompt is not False and not body.continue_final_message
        made = []
        for each in bodies:
            role = state.config.response_role if opens else each.messages[-1].role
            echo = _echoed(each, role, params.n) if each.echo else ""
            made.append(cls(each, request, model, f"chatcmpl-{call.id}", role, echo))
        return made

    @property
    def writer(self) -> LogprobWriter:
        as_ids = self.request.state.writes_token_ids(self.body.return_tokens_as_token_ids)
        return LogprobWriter(self.request.engine.tokenizer, as_ids, self.body.logprob_token_ids)

    def chunks(self) -> PayloadWriter:
        chunks = ChatChunks(self)
        return StoringChunks(chunks, self.role, self._store_choices) if self.body.store else chunks

    async def whole(self) -> ChatCompletion:
        (output,) = await self.request.whole()
        made = await write_reply(self.request, [output], lambda: self._whole(output))
        if self.body.store:
            self.store(made)
        return made

    def _whole(self, output: RequestOutput) -> ChatCompletion:
        made = self._completion([self._choice(each, each.index) for each in output.outputs])
        if self.body.return_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return made

    def store(self, completion: ChatCompletion) -> None:
        messages = [message.model_dump(exclude_unset=True) for message in self.body.messages]
        kept = copy(completion)
        kept.metadata = self.body.metadata or {}
        state, owner = self.request.state, self.request.call.key.name
        state.completions.add(StoredCompletion(kept, messages, owner))

    def _store_choices(self, choices: list[ChatChoice], first: ChatChunk) -> None:
        """Store a streamed completion. `first`: its first chunk, which has what was asked about the prompt."""
        completion = self._completion(choices)
        completion.prompt_token_ids, completion.prompt_logprobs = first.prompt_token_ids, first.prompt_logprobs
        self.store(completion)

    async def whole_with(self, others: Sequence[ChatJob]) -> ChatCompletion:
        """The completion of several conversations with one choice each, this one's first."""
        jobs, outputs, choices = [self, *others], await self.request.whole(), []
        for index, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
            (each,) = output.outputs
            choices.append(job._choice(each, index))
        return self._completion(choices)

    def _completion(self, choices: list[ChatChoice]) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=int(time.time()),
            model=self.model,
            choices=choices,
            usage=self.request.usage(),
            system_fingerprint=FINGERPRINT,
        )

    def _choice(self, each: CompletionOutput, index: int) -> ChatChoice:
        """`index`: the choice's number in the reply."""
        parts = self.request.parts.read(index, each)
        message = ReplyMessage(role=self.role, content=self.echo + content_of(parts))
        choice = ChatChoice(
            index=index, message=message, finish_reason=each.finish_reason, stop_reason=each.stop_reason
        )
        if not all(isinstance(part, Content) for part in parts):
            choice.finish_reason = self._complete(message, parts, each.finish_reason)
        if each.logprobs is not None and self.body.logprobs:
            choice.logprobs = self.writer.chat(each.token_ids, each.logprobs, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            choice.token_ids = each.token_ids
        return choice

    def _complete(self, message: ReplyMessage, parts: Sequence[OutputPart], reason: str | None) -> str | None:
        """Add reasoning and calls to a message; return its finish reason."""
        reasoning, calls = reasoning_of(parts), calls_of(parts)
        if reasoning:
            message.reasoning = message.reasoning_content = reasoning
        if not calls:
            return reason
        message.content = message.content or None
        message.tool_calls = [_call(self.request.answer, call.id, call.name, call.arguments) for call in calls]
        return finish_reason(reason, True)


def finish_reason(reason: str | None, called: bool) -> str | None:
    """An answer with calls ends with "tool_calls", unless it was cut short."""
    return "tool_calls" if called and reason == "stop" else reason


def _call(answer: ChatAnswer, call_id: str, name: str, arguments: str) -> ReplyCall:
    if answer.is_custom(name):
        return ReplyCall(id=call_id, type="custom", custom=CalledCustom(name=name, input=arguments))
    return ReplyCall(id=call_id, type="function", function=CalledFunction(name=name, arguments=arguments))


async def _prompt(state: ServerState, body: ChatRequest, tools: RequestTools) -> TokenizedPrompt:
    variables: dict[str, Any] = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    excluded = not tools.is_active and state.config.exclude_tools_when_tool_choice_none
    truncate, side = body.truncate_prompt_tokens, body.truncation_side
    shown = None if excluded else tools.shown()
    return await read_chat(state, body, truncate, body.cache_salt, side, shown, **variables)


def _echoed(body: ChatRequest, role: str, num_copies: int) -> str:
    """The last message's text, with which every choice begins."""
    last = body.messages[-1]
    if last.role != role or last.content is None:
        message = f"echo begins the reply with the last message, which must have content and be of the role {role!r}."
        raise RequestError(message, "echo")
    text = last.content
    if not isinstance(text, str):
        text = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in text)
    check_copies("echo", num_copies, num_characters=len(text))
    return text


# ---------------------------------------------------------------- the stream


class ChatChunks:
    """Writes the chunks of one reply.

    A chunk with some content and nothing else is the commonest, so it is put together from encoded bytes. Tests hold it
    equal to the encoded struct.
    """

    def __init__(self, job: ChatJob) -> None:
        body, asked = job.body, job.body.stream_options
        self.request = job.request
        self._job = job
        self._base: dict[str, Any] = {"id": job.id, "created": int(time.time()), "model": job.model}
        self._base["system_fingerprint"] = FINGERPRINT
        forced = job.request.state.config.enable_force_include_usage
        self._usage = forced or (asked is not None and asked.include_usage)
        self._continuous_usage = asked is not None and asked.continuous_usage_stats
        self._token_ids = bool(body.return_token_ids)
        self._logprobs = job.writer if body.logprobs else None
        self._text_only = not (self._token_ids or self._continuous_usage or body.logprobs)
        self._read = job.request.parts.read
        self._called: set[int] = set()  # choices with tool calls
        self._customs: set[tuple[int, int]] = set()  # choices and calls of custom tools
        self._around: dict[int, tuple[bytes, bytes]] = {}  # bytes before and after a content chunk's text, by choice

    def payloads(self, output: RequestOutput) -> Sequence[bytes]:
        each = output.outputs[0]
        around = self._around.get(each.index)
        if around is None or not self._text_only or len(output.outputs) > 1 or each.finish_reason is not None:
            return self._chunks(output)
        parts = self._read(each.index, each)
        if len(parts) == 1 and type(parts[0]) is Content:
            return (around[0] + encode(parts[0].text) + around[1],)
        return (
            (encode(self._chunk(ChunkChoice(index=each.index, delta=self._delta(each.index, parts)))),) if parts else ()
        )

    def last_payloads(self) -> Sequence[bytes]:
        if not self._usage:
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
                reason = finish_reason(each.finish_reason, each.index in self._called)
                end = ChunkChoice(index=each.index, delta=Delta(), finish_reason=reason)
                end.stop_reason = each.stop_reason
                made.append(encode(self._chunk(end)))
        return made

    def _first(self, index: int, output: RequestOutput) -> list[bytes]:
        """The role, and with the first choice what was asked about the prompt."""
        chunk = self._opening(ChunkChoice(index=index, delta=Delta(role=self._job.role, content="")))
        if not self._around:
            if self._token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            if output.prompt_logprobs is not None:
                chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        self._prepare(index)
        made = [encode(chunk)]
        if self._job.echo:
            made.append(encode(self._opening(ChunkChoice(index=index, delta=Delta(content=self._job.echo)))))
        return made

    def _opening(self, choice: ChunkChoice) -> ChatChunk:
        """A chunk without generated tokens. It is written when the first ones come; its usage must not count them."""
        chunk = self._chunk(choice)
        if isinstance(chunk.usage, Usage):
            chunk.usage.total_tokens, chunk.usage.completion_tokens = chunk.usage.prompt_tokens, 0
        return chunk

    def _prepare(self, index: int) -> None:
        mark = "\x00"
        whole = encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=mark))))
        before, after = whole.split(encode(mark))
        self._around[index] = before, after

    def _choice(self, each: CompletionOutput, parts: Sequence[OutputPart]) -> ChunkChoice:
        choice = ChunkChoice(index=each.index, delta=self._delta(each.index, parts))
        if self._token_ids:
            choice.token_ids = each.token_ids
        if self._logprobs is not None and each.logprobs is not None:
            num_top = self._job.body.top_logprobs or 0
            choice.logprobs = self._logprobs.chat(each.token_ids, each.logprobs, num_top)
        return choice

    def _delta(self, index: int, parts: Sequence[OutputPart]) -> Delta:
        if all(isinstance(part, Content) for part in parts):
            return Delta(content=content_of(parts))
        delta, calls = Delta(), {}
        for part in parts:
            if isinstance(part, Content):
                delta.content = (delta.content or "") + part.text
            elif isinstance(part, Reasoning):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + part.text
            elif isinstance(part, ToolCall):
                self._called.add(index)
                self._customs |= {(index, part.index)} if self.request.answer.is_custom(part.name) else set()
                calls[part.index] = _call(self.request.answer, part.id, part.name, "")
            elif part.index in calls:
                add_text(calls[part.index], part.text)
            elif (index, part.index) in self._customs:
                calls[part.index] = ReplyCall(custom=CalledCustom(input=part.text))
            else:
                calls[part.index] = ReplyCall(function=CalledFunction(arguments=part.text))
        if calls:
            for number, call in calls.items():
                call.index = number
            delta.tool_calls = list(calls.values())
        return delta

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._base, choices=[choice])
        if self._continuous_usage:
            chunk.usage = self.request.usage()
        elif self._usage:
            chunk.usage = None  # as OpenAI announces usage that comes later
        else:
            chunk.usage = UNSET
        return chunk
