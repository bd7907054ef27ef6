"""/v1/completions: text or token ids in, text out; one prompt or many."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from kvasir.frontend.requests.input import TokensPrompt
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_request import Run
from kvasir.server.http import FINGERPRINT, Call, StrictRoute, TheCall, answers, reply, stream, unless_gone
from kvasir.server.logprobs import LogprobWriter, prompt_logprobs
from kvasir.server.params import default_max_tokens, sampling_params, take_id, terms
from kvasir.server.prompts import PromptMaker
from kvasir.server.schema.base import encode
from kvasir.server.schema.completions import Completion, CompletionChoice, CompletionRequest
from kvasir.server.state import ServerState, State

router = APIRouter(route_class=StrictRoute, tags=["OpenAI"])


@router.post("/v1/completions", responses=answers(Completion, "Texts; with `stream`, events of the same shape."))
async def create_completion(body: CompletionRequest, request: Request, state: State, call: TheCall) -> Response:
    """Complete a text."""
    job = await unless_gone(request, CompletionJob.make(state, call, body))
    if body.stream:
        return await stream(request, job.payloads())
    return reply(await unless_gone(request, job.whole()))


@dataclass(slots=True)
class CompletionJob:
    """A request, ready to run."""

    body: CompletionRequest
    run: Run
    model: str
    id: str
    created: int
    scores_only: bool  # max_tokens=0: the token that had to be generated is dropped
    offsets: dict[int, int] = field(default_factory=dict)  # characters written so far, by choice
    parts: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # a plain chunk around its text, by choice

    @classmethod
    async def make(cls, state: ServerState, call: Call, body: CompletionRequest) -> CompletionJob:
        take_id(call, body)
        model = state.check_model(body.model)
        prompts = await _prompts(state, body)
        params = _params(state, body)
        run = Run(state, call, prompts, params, terms(body, body.user))
        return cls(body, run, model, f"cmpl-{call.id}", int(time.time()), body.max_tokens == 0)

    def _writer(self, named: Sequence[int] | None = None) -> LogprobWriter:
        return LogprobWriter(self.run.engine.tokenizer, bool(self.body.return_tokens_as_token_ids), named)

    async def whole(self) -> Completion:
        outputs = await self.run.whole()
        choices = []
        for number, output in enumerate(outputs):
            self.run.check(output)
            choices += [self._choice(number, output, each, True) for each in output.outputs]
        return self._reply(choices, final=True)

    # ------------------------------------------------------------ the stream

    async def payloads(self) -> AsyncGenerator[list[bytes], None]:
        options = self.body.stream_options
        wants_usage = self.run.state.config.enable_force_include_usage or bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        plain = not (continuous or self.body.return_token_ids or self.body.logprobs is not None or self.scores_only)
        source, width, parts = self.run.outputs(), self.run.params.n, self.parts
        try:
            async for number, output in source:
                each = output.outputs[0]
                at = number * width + each.index
                if plain and len(output.outputs) == 1 and each.finish_reason is None and at in parts:
                    if each.text:
                        before, after = parts[at]
                        yield [before + encode(each.text) + after]
                    continue
                if some := self._chunks(number, output, wants_usage, continuous):
                    yield some
            if wants_usage:
                yield [encode(self._reply([], final=True))]
        finally:
            await source.aclose()

    def _chunks(self, number: int, output: RequestOutput, wants_usage: bool, continuous: bool) -> list[bytes]:
        self.run.check(output)
        made = []
        for each in output.outputs:
            at = number * self.run.params.n + each.index
            choice = self._choice(number, output, each, at not in self.parts)
            if at not in self.parts:
                self._prepare(at, wants_usage)
            if _says_something(choice):
                chunk = self._reply([choice], final=continuous)
                chunk.usage = chunk.usage if continuous else None if wants_usage else UNSET
                made.append(encode(chunk))
        return made

    def _prepare(self, at: int, wants_usage: bool) -> None:
        mark = "\x00"
        chunk = self._reply([CompletionChoice(index=at, text=mark)], final=False)
        chunk.usage = None if wants_usage else UNSET
        before, after = encode(chunk).split(encode(mark))
        self.parts[at] = before, after

    # ------------------------------------------------------------ choices

    def _reply(self, choices: list[CompletionChoice], final: bool) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=self.run.usage() if final else UNSET,
        )

    def _choice(self, number: int, output: RequestOutput, each: CompletionOutput, first: bool) -> CompletionChoice:
        """`first`: this is the beginning of the choice's text, where an echo stands."""
        body = self.body
        at = number * self.run.params.n + each.index
        text, ids = ("", []) if self.scores_only else (each.text, each.token_ids)
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
        tokenizer = self.run.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)


def _says_something(choice: CompletionChoice) -> bool:
    """Some deltas have nothing to show: half a character, or what may be the beginning of a stop string. What the first
    one says of the prompt is said only there."""
    of_prompt = choice.prompt_logprobs is not UNSET or choice.prompt_token_ids is not UNSET
    of_text = bool(choice.text or choice.token_ids) or choice.logprobs is not None
    return of_text or of_prompt or choice.finish_reason is not None


async def _prompts(state: ServerState, body: CompletionRequest) -> Sequence[TokensPrompt]:
    maker = PromptMaker(state, body.truncate_prompt_tokens, body.cache_salt)
    given = body.prompt
    if isinstance(given, str):
        return await maker.texts([given], body.add_special_tokens is not False)
    if isinstance(given[0], str):
        return await maker.texts(given, body.add_special_tokens is not False)
    if isinstance(given[0], int):
        return [maker.ids(given)]
    return [maker.ids(ids) for ids in given]


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    max_tokens = default_max_tokens(state, 16) if body.max_tokens is None else max(1, body.max_tokens)
    params = sampling_params(state, body, max_tokens=max_tokens, logprobs=body.logprobs, stream=bool(body.stream))
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params
