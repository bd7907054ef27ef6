"""/v1/chat/completions over HTTP; websocket.py has the same over a WebSocket."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.server.api_request import Run
from kvasir.server.http import FINGERPRINT, Call, StrictRoute, TheCall, answers, reply, stream, unless_gone
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.params import default_max_tokens, sampling_params, take_id, terms
from kvasir.server.prompts import PromptMaker
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
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, "A reply; with `stream`, events of chunks."))
async def create_chat_completion(body: ChatRequest, request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation."""
    chat = await unless_gone(request, ChatJob.make(state, call, body))
    if body.stream:
        return await stream(request, chat.chunks().payloads())
    return reply(await unless_gone(request, chat.whole()))


@dataclass(slots=True)
class ChatJob:
    """A chat request, ready to run."""

    body: ChatRequest
    run: Run
    model: str
    id: str
    role: str
    echo: str

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: ChatRequest) -> ChatJob:
        take_id(call, body)
        model = state.check_model(body.model)
        maker = PromptMaker(state, body.truncate_prompt_tokens, body.cache_salt)
        variables = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        if state.config.exclude_tools_when_tool_choice_none:
            body.tools = None
        prompt = await maker.chat(body, **variables)
        max_tokens = body.max_completion_tokens or body.max_tokens or default_max_tokens(state, None)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = sampling_params(state, body, max_tokens=max_tokens, logprobs=logprobs, stream=bool(body.stream))
        run = Run(state, call, [prompt], params, terms(body, body.user or body.safety_identifier))
        opens = body.add_generation_prompt is not False and not body.continue_final_message
        role = state.config.response_role if opens else body.messages[-1].role
        return cls(body, run, model, f"chatcmpl-{call.id}", role, _echoed(body, role))

    @property
    def writer(self) -> LogprobWriter:
        as_ids, named = bool(self.body.return_tokens_as_token_ids), self.body.logprob_token_ids
        return LogprobWriter(self.run.engine.tokenizer, as_ids, named)

    def chunks(self) -> ChatChunks:
        options = self.body.stream_options
        forced = self.run.state.config.enable_force_include_usage
        wishes = StreamWishes(
            usage=forced or (options is not None and options.include_usage),
            continuous_usage=options is not None and options.continuous_usage_stats,
            token_ids=bool(self.body.return_token_ids),
            num_top_logprobs=(self.body.top_logprobs or 0) if self.body.logprobs else None,
            echo=self.echo,
        )
        chunks = ChatChunks(self.run, self.id, int(time.time()), self.model, self.role, wishes)
        return chunks.with_logprobs(self.writer) if self.body.logprobs else chunks

    async def whole(self) -> ChatCompletion:
        (output,) = await self.run.whole()
        self.run.check(output)
        made = ChatCompletion(
            id=self.id,
            created=int(time.time()),
            model=self.model,
            choices=self._choices(output),
            usage=self.run.usage(),
            system_fingerprint=FINGERPRINT,
        )
        if self.body.return_token_ids:
            made.prompt_token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return made

    def _choices(self, output: RequestOutput) -> list[ChatChoice]:
        choices = []
        for each in output.outputs:
            choice = ChatChoice(
                index=each.index,
                message=ReplyMessage(role=self.role, content=self.echo + each.text),
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
            )
            if each.logprobs is not None and self.body.logprobs:
                choice.logprobs = self.writer.chat(each.token_ids, each.logprobs, self.body.top_logprobs or 0)
            if self.body.return_token_ids:
                choice.token_ids = each.token_ids
            choices.append(choice)
        return choices


def _echoed(body: ChatRequest, role: str) -> str:
    """The last message's text, where echo asks for it."""
    if not body.echo:
        return ""
    last = body.messages[-1]
    if last.role != role or last.content is None:
        message = f"echo begins the reply with the last message, which must have content and be of the role {role!r}."
        raise RequestError(message, "echo")
    if isinstance(last.content, str):
        return last.content
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in last.content)


# ----------------------------------------------------------------
# Chunks of a chat completion. The commonest one, some text and nothing else, is put together from bytes that are
# ready: a token's way to the socket is the hot path of the server. Tests hold it equal to what the struct gives.


@dataclass(slots=True)
class StreamWishes:
    """What a client wants beside the text."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    num_top_logprobs: int | None = None  # None: no log-probabilities
    echo: str = ""  # every choice begins with this

    @property
    def text_only(self) -> bool:
        return not self.token_ids and not self.continuous_usage and self.num_top_logprobs is None


class ChatChunks:
    """Writes the chunks of one reply."""

    def __init__(self, run: Run, id: str, created: int, model: str, role: str, wishes: StreamWishes) -> None:
        self.run = run
        self.wishes = wishes
        self.role = role
        self._base: dict[str, Any] = {"id": id, "created": created, "model": model, "system_fingerprint": FINGERPRINT}
        self._writer: LogprobWriter | None = None
        self._begun: set[int] = set()
        self._parts: dict[int, tuple[bytes, bytes]] = {}  # a text chunk's bytes around the text, by choice

    def with_logprobs(self, writer: LogprobWriter) -> ChatChunks:
        self._writer = writer
        return self

    async def payloads(self) -> AsyncGenerator[list[bytes], None]:
        """JSON objects, as many at a time as the engine has made ready."""
        plain, source = self.wishes.text_only, self.run.outputs()
        parts = self._parts
        try:
            async for _, output in source:
                completions = output.outputs
                each = completions[0]
                if plain and len(completions) == 1 and each.finish_reason is None and each.index in parts:
                    if each.text:
                        before, after = parts[each.index]
                        yield [before + encode(each.text) + after]
                    continue
                if some := self._chunks(output):
                    yield some
            if self.wishes.usage:
                yield [encode(ChatChunk(**self._base, choices=[], usage=self.run.usage()))]
        finally:
            await source.aclose()

    def _chunks(self, output: RequestOutput) -> list[bytes]:
        self.run.check(output)
        made: list[bytes] = []
        for each in output.outputs:
            if each.index not in self._begun:
                made += self._first(each.index, output)
            if each.text or (each.token_ids and not self.wishes.text_only):
                made.append(encode(self._chunk(self._text(each))))
            if each.finish_reason is not None:
                end = ChunkChoice(index=each.index, delta=Delta(), finish_reason=each.finish_reason)
                end.stop_reason = each.stop_reason
                made.append(encode(self._chunk(end)))
        return made

    def _first(self, index: int, output: RequestOutput) -> list[bytes]:
        """The role, and what is said of the prompt."""
        chunk = self._chunk(ChunkChoice(index=index, delta=Delta(role=self.role, content="")))
        if not self._begun:
            if self.wishes.token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            if output.prompt_logprobs is not None:
                chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        self._begun.add(index)
        self._prepare(index)
        made = [encode(chunk)]
        if self.wishes.echo:
            made.append(encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=self.wishes.echo)))))
        return made

    def _prepare(self, index: int) -> None:
        mark = "\x00"
        whole = encode(self._chunk(ChunkChoice(index=index, delta=Delta(content=mark))))
        before, after = whole.split(encode(mark))
        self._parts[index] = before, after

    def _text(self, each: CompletionOutput) -> ChunkChoice:
        choice = ChunkChoice(index=each.index, delta=Delta(content=each.text))
        if self.wishes.token_ids:
            choice.token_ids = each.token_ids
        num = self.wishes.num_top_logprobs
        if num is not None and each.logprobs is not None and self._writer is not None:
            choice.logprobs = self._writer.chat(each.token_ids, each.logprobs, num)
        return choice

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._base, choices=[choice])
        if self.wishes.continuous_usage:
            chunk.usage = self.run.usage()
        elif self.wishes.usage:
            chunk.usage = None  # OpenAI's way to say that it comes later
        else:
            chunk.usage = UNSET
        return chunk
