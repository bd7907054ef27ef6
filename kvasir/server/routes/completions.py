"""/v1/completions: text or token ids in, text out; one prompt or many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator
from starlette.responses import Response

from kvasir.errors import RequestError
from kvasir.frontend.requests.embeddings import decode_base64
from kvasir.frontend.requests.prompts import EmbedsPrompt, TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import content_of
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_request import ApiRequest, check_length, read_prompts, within
from kvasir.server.errors import EVENTS, answers
from kvasir.server.event_stream import EventStream, OpenAIEvents
from kvasir.server.http import FINGERPRINT, Call, StrictRequest, StrictRoute, TheCall, reply, unless_gone, validated
from kvasir.server.large_bodies import check_copies, write_reply
from kvasir.server.limits import check_limits
from kvasir.server.logprobs import CompletionLogprobs, LogprobWriter, TextOffsets, prompt_logprobs
from kvasir.server.routes.chat import create_chat_completion
from kvasir.server.schema.base import MAX_TOKEN_IDS, Reply, Usage, encode, example, invalid, one_complaint, refused
from kvasir.server.schema.chat import ChatCompletion, ChatRequest
from kvasir.server.schema.sampling import NO_TOOLS_HERE, PromptIds, SamplingBody, StreamOptions, sampling_params
from kvasir.server.state import ServerState, State

_MAX_EMBEDS = 128


class CompletionRequest(SamplingBody):
    max_values = MAX_TOKEN_IDS
    model_config = example(prompt="Once upon a time", max_tokens=32)

    model: str | None = Field(default=None, description="A name from /v1/models. Unset: the served model.")
    prompt: Annotated[
        str | list[str] | PromptIds | list[PromptIds] | None,
        one_complaint(
            "prompt", "prompt must be a string, a list of strings, a list of token ids or a list of such lists."
        ),
    ] = Field(default=None, description="Text or token ids; one prompt or a list of prompts.")
    prompt_embeds: str | Annotated[list[str], Field(min_length=1, max_length=_MAX_EMBEDS)] | None = Field(
        default=None,
        description="A tensor [tokens, hidden] in place of a prompt's tokens, as torch.save or safetensors writes it, "
        "in base64; or a list of them. Their choices come before those of prompt. Needs --enable-prompt-embeds.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Maximum number of output tokens (default 16). 0 only with echo, to score the prompt.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokenizer's special tokens (default: yes)."
    )
    user: str | None = Field(default=None, description="Shown in the server's log.")
    suffix: Any = refused("text is completed only at its end.", "")
    tools: Any = refused(NO_TOOLS_HERE, [])
    tool_choice: Any = refused(NO_TOOLS_HERE, "none")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options", "stream_options needs stream: set stream to true, or leave stream_options out."
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs: set it to 0 or more.")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens must be at least 1, or 0 with echo.")
        if self.prompt is None and self.prompt_embeds is None:
            raise invalid("prompt", "prompt is missing.")
        if self.prompt in ([], [[]]) and self.prompt_embeds is None:
            raise invalid("prompt", "prompt is empty: give at least one.")
        if self.prompt_embeds is not None and self.echo:
            raise invalid("echo", "echo is for text: prompt_embeds has none.")
        return self


class CompletionChoice(Reply, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(Reply, kw_only=True):
    """A whole completion, or a chunk of a stream, which has the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    responses=answers(Completion, description="Texts; with `stream`, events of the same shape.", stream=EVENTS),
)
async def create_completion(body: CompletionRequest, request: Request, state: State, call: TheCall) -> Response:
    """Complete a text."""
    job = await unless_gone(request, CompletionJob.make(state, call, body))
    if body.stream:
        return EventStream(job.request, OpenAIEvents(job))
    return reply(await unless_gone(request, job.whole()))


_EITHER = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (ChatRequest, CompletionRequest)]}
_INVOCATION = {"requestBody": {"required": True, "content": {"application/json": {"schema": _EITHER}}}}


@router.post(
    "/invocations",
    responses=answers(ChatCompletion, Completion, description="With `stream`, events.", stream=EVENTS),
    openapi_extra=_INVOCATION,
)
async def invoke(request: Request, state: State, call: TheCall) -> Response:
    """Answer a conversation or complete a text, whichever the body has: for SageMaker, which knows only this path."""
    assert isinstance(request, StrictRequest), "its route is strict"
    given = await request.json()
    if not isinstance(given, dict) or ("messages" in given) == ("prompt" in given):
        raise RequestError("The body must be a JSON object with messages (chat) or prompt (completions).")
    if "messages" in given:
        chat = validated(ChatRequest, request.known_fields(ChatRequest))
        return await create_chat_completion(chat, request, state, call)
    return await create_completion(
        validated(CompletionRequest, request.known_fields(CompletionRequest)), request, state, call
    )


@dataclass(slots=True)
class CompletionJob:
    """A completion request, ready to run; it writes the reply, whole or in chunks."""

    body: CompletionRequest
    request: ApiRequest
    model: str
    id: str
    created: int
    scores_only: bool  # max_tokens=0: the one token that was generated is dropped
    offsets: dict[int, TextOffsets] = field(default_factory=dict)  # of output tokens, by choice
    around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # bytes before and after a chunk's text

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: CompletionRequest) -> CompletionJob:
        call.take_id(body.request_id)
        model = state.check_model(body.model)
        params = _params(state, body)
        async with within(state, call, body.timeout):
            prompts = await _prompts(state, body, params)
        _check_copies(body, params, prompts)
        priority, timeout = body.priority or 0, body.timeout
        request = ApiRequest(state, call, prompts, params, priority, timeout, body.user, model=model)
        return cls(body, request, model, f"cmpl-{call.id}", int(time.time()), body.max_tokens == 0)

    def _writer(self, named: Sequence[int] | None = None) -> LogprobWriter:
        as_ids = self.request.state.writes_token_ids(self.body.return_tokens_as_token_ids)
        return LogprobWriter(self.request.engine.tokenizer, as_ids, named)

    async def whole(self) -> Completion:
        outputs = await self.request.whole()
        return await write_reply(self.request, outputs, lambda: self._whole(outputs))

    def _whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = []
        for output in outputs:
            choices += [self._choice(output, each, True) for each in output.outputs]
        return self._reply(choices, final=True)

    # ------------------------------------------------------------ the stream

    def payloads(self, output: RequestOutput) -> Sequence[bytes]:
        each = output.outputs[0]
        at = self.request.choice_of(output, each.index)
        around = self.around.get(at)
        if around is None or not self._text_only or len(output.outputs) > 1 or each.finish_reason is not None:
            return self._chunks(output)
        text = content_of(self.request.parts.read(at, each))
        return (around[0] + encode(text) + around[1],) if text else ()

    def last_payloads(self) -> Sequence[bytes]:
        return (encode(self._reply([], final=True)),) if self._wants_usage else ()

    @property
    def _text_only(self) -> bool:
        asked = self.body.return_token_ids or self.body.logprobs is not None or self.scores_only
        return not (asked or self._continuous_usage)

    @property
    def _wants_usage(self) -> bool:
        options = self.body.stream_options
        return self.request.state.config.enable_force_include_usage or bool(options and options.include_usage)

    @property
    def _continuous_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.continuous_usage_stats)

    def _chunks(self, output: RequestOutput) -> list[bytes]:
        self.request.check(output)
        made = []
        for each in output.outputs:
            at = self.request.choice_of(output, each.index)
            choice = self._choice(output, each, at not in self.around)
            if at not in self.around:
                self._prepare(at)
            if _shows_something(choice):
                chunk = self._reply([choice], final=self._continuous_usage)
                chunk.usage = chunk.usage if self._continuous_usage else None if self._wants_usage else UNSET
                made.append(encode(chunk))
        return made

    def _prepare(self, at: int) -> None:
        mark = "\x00"
        chunk = self._reply([CompletionChoice(index=at, text=mark)], final=False)
        chunk.usage = None if self._wants_usage else UNSET
        before, after = encode(chunk).split(encode(mark))
        self.around[at] = before, after

    # ------------------------------------------------------------ choices

    def _reply(self, choices: list[CompletionChoice], final: bool) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=self._usage() if final else UNSET,
        )

    def _usage(self) -> Usage:
        usage = self.request.usage()
        if self.scores_only:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return usage

    def _choice(self, output: RequestOutput, each: CompletionOutput, first: bool) -> CompletionChoice:
        """`first`: the choice begins here, so an echo of the prompt comes before its text."""
        body = self.body
        at = self.request.choice_of(output, each.index)
        content = content_of(self.request.parts.read(at, each))
        text, ids = ("", []) if self.scores_only else (content, each.token_ids)
        choice = CompletionChoice(index=at, text=text, finish_reason=each.finish_reason, stop_reason=each.stop_reason)
        if self.scores_only and each.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = "length", None
        echo = self._echo(output) if body.echo and first else ""
        choice.text = echo + text
        if body.logprobs is not None and each.logprobs is not None:
            self._add_logprobs(choice, output, each, echo, ids, first, body.logprobs)
        if body.return_token_ids:
            choice.token_ids = ids
            if first:
                choice.prompt_token_ids = output.prompt_token_ids
        if body.prompt_logprobs is not None and first and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _add_logprobs(
        self,
        choice: CompletionChoice,
        output: RequestOutput,
        each: CompletionOutput,
        echo: str,
        ids: list[int],
        first: bool,
        num: int,
    ) -> None:
        positions = list(each.logprobs or [])[: len(ids)]
        if choice.index not in self.offsets:
            params, prompt = self.request.params, output.prompt_token_ids
            how = params.skip_special_tokens, params.spaces_between_special_tokens
            self.offsets[choice.index] = TextOffsets(self.request.engine.tokenizer, prompt, len(echo), *how)
        offsets = self.offsets[choice.index].of(ids)
        choice.logprobs = self._writer(self.body.logprob_token_ids).completion(ids, positions, num, offsets)
        if self.body.echo and first and output.prompt_logprobs is not None:
            of_ids = TextOffsets(self.request.engine.tokenizer).in_text(output.prompt_token_ids, echo)
            of_prompt = self._writer().completion(output.prompt_token_ids, list(output.prompt_logprobs), num, of_ids)
            for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
                setattr(choice.logprobs, name, getattr(of_prompt, name) + getattr(choice.logprobs, name))

    def _echo(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self.request.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)  # as it was given, so with all


def _shows_something(choice: CompletionChoice) -> bool:
    """Whether a delta is worth a chunk: half a character, or what may begin a stop string, has no text yet. The first
    delta alone has what was asked about the prompt."""
    of_prompt = choice.prompt_logprobs is not UNSET or choice.prompt_token_ids is not UNSET
    of_text = bool(choice.text or choice.token_ids) or choice.logprobs is not None
    return of_text or of_prompt or choice.finish_reason is not None


async def _prompts(state: ServerState, body: CompletionRequest, params: SamplingParams) -> Sequence[TokenizedPrompt]:
    given, embeds = body.prompt, body.prompt_embeds
    several: Any = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if embeds is not None and given in (None, "", []):  # OpenAI's client cannot leave prompt out
        several = []
    tensors = [] if embeds is None else [embeds] if isinstance(embeds, str) else embeds
    check_limits(params, len(several) + len(tensors), state.config.max_choices)
    special, truncate = body.add_special_tokens is not False, body.truncate_prompt_tokens
    read = await read_embeddings(state, tensors, truncate, body.cache_salt) if tensors else []
    return read + await read_prompts(state, several, special, truncate, body.cache_salt, body.truncation_side)


def _check_copies(body: CompletionRequest, params: SamplingParams, prompts: Sequence[TokenizedPrompt]) -> None:
    """Every completion repeats what is asked about its prompt."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if body.return_token_ids:
        check_copies("return_token_ids", params.n, num_tokens=num_tokens)
    if body.echo:
        check_copies("echo", params.n, num_characters=sum(len(prompt.text or prompt.token_ids) for prompt in prompts))
    if params.prompt_logprobs is not None:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        check_copies(name, params.n, num_logprobs=num_tokens * (1 + max(0, params.prompt_logprobs)))


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    max_tokens = state.default_max_tokens(16) if body.max_tokens is None else max(1, body.max_tokens)
    params = sampling_params(
        body, state.default_params, max_tokens=max_tokens, logprobs=body.logprobs, stream=bool(body.stream)
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


async def read_embeddings(
    state: ServerState, given: Sequence[str], truncate: int | None, salt: str | None
) -> list[TokenizedPrompt]:
    """Decode and check prompts of embeddings, which are tensors in base64."""
    processor, pool = state.engine.input_processor.prompts, state.engine.text_pool
    if not processor.config.enable_prompt_embeds:
        raise RequestError("prompt_embeds is off: start the server with --enable-prompt-embeds.", "prompt_embeds")

    def read() -> list[TokenizedPrompt]:
        files = map(decode_base64, given)
        return [processor.read(EmbedsPrompt(prompt_embeds=file, cache_salt=salt or ""), truncate) for file in files]

    found = await pool.run(sum(map(len, given)), read)
    for each in found:
        check_length(state, len(each.token_ids))
    return found
