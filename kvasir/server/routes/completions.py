"""/v1/completions: text or token ids in, text out; one prompt or many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from kvasir.frontend.requests.prompts import TokenizedPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.parsers.base import content_of
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_request import ApiRequest, read_prompts
from kvasir.server.event_stream import EventStream, OpenAIEvents
from kvasir.server.http import FINGERPRINT, Call, StrictRoute, TheCall, answers, reply, unless_gone
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.schema.base import encode
from kvasir.server.schema.completions import Completion, CompletionChoice, CompletionRequest
from kvasir.server.schema.sampling import sampling_params
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/completions", responses=answers(Completion, "Texts; with `stream`, events of the same shape."))
async def create_completion(body: CompletionRequest, request: Request, state: State, call: TheCall) -> Response:
    """Complete a text."""
    job = await unless_gone(request, CompletionJob.make(state, call, body))
    if body.stream:
        return EventStream(job.request, OpenAIEvents(job))
    return reply(await unless_gone(request, job.whole()))


@dataclass(slots=True)
class CompletionJob:
    """A completion request, ready to run; it writes the reply, whole or in chunks."""

    body: CompletionRequest
    request: ApiRequest
    model: str
    id: str
    created: int
    scores_only: bool  # max_tokens=0: the one token that was generated is dropped
    offsets: dict[int, int] = field(default_factory=dict)  # characters written so far, by choice
    around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # bytes before and after a chunk's text

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: CompletionRequest) -> CompletionJob:
        call.take_id(body.request_id)
        model = state.check_model(body.model)
        prompts = await _prompts(state, body)
        params = _params(state, body)
        request = ApiRequest(state, call, prompts, params, body.priority or 0, body.timeout, body.user)
        return cls(body, request, model, f"cmpl-{call.id}", int(time.time()), body.max_tokens == 0)

    def _writer(self, named: Sequence[int] | None = None) -> LogprobWriter:
        return LogprobWriter(self.request.engine.tokenizer, bool(self.body.return_tokens_as_token_ids), named)

    async def whole(self) -> Completion:
        outputs = await self.request.whole()
        choices = []
        for output in outputs:
            self.request.check(output)
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
            usage=self.request.usage() if final else UNSET,
        )

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
        self.offsets[at] = self.offsets.get(at, 0) + len(choice.text)
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
        offset = self.offsets.get(choice.index, 0) + len(echo)
        choice.logprobs = self._writer(self.body.logprob_token_ids).completion(ids, positions, num, offset)
        if self.body.echo and first and output.prompt_logprobs is not None:
            of_prompt = self._writer().completion(output.prompt_token_ids, list(output.prompt_logprobs), num, 0)
            for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
                setattr(choice.logprobs, name, getattr(of_prompt, name) + getattr(choice.logprobs, name))

    def _echo(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self.request.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)


def _shows_something(choice: CompletionChoice) -> bool:
    """Whether a delta is worth a chunk: half a character, or what may begin a stop string, has no text yet. The first
    delta alone has what was asked about the prompt."""
    of_prompt = choice.prompt_logprobs is not UNSET or choice.prompt_token_ids is not UNSET
    of_text = bool(choice.text or choice.token_ids) or choice.logprobs is not None
    return of_text or of_prompt or choice.finish_reason is not None


async def _prompts(state: ServerState, body: CompletionRequest) -> Sequence[TokenizedPrompt]:
    given = body.prompt
    several: Any = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    special, truncate = body.add_special_tokens is not False, body.truncate_prompt_tokens
    return await read_prompts(state, several, special, truncate, body.cache_salt)


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    max_tokens = state.default_max_tokens(16) if body.max_tokens is None else max(1, body.max_tokens)
    params = sampling_params(
        body, state.default_params, max_tokens=max_tokens, logprobs=body.logprobs, stream=bool(body.stream)
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params
