"""One API request on its way through the engine: admitted, followed, counted; aborted when nobody reads on.

A request may have several prompts; each becomes one of the engine's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import RequestError
from kvasir.frontend.requests.input import TokensPrompt
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server import request_log
from kvasir.server.errors import ApiError, as_api_error, timed_out
from kvasir.server.http import Call
from kvasir.server.schema.base import PromptTokensDetails, Usage
from kvasir.server.state import ServerState

_numbers = itertools.count()
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # which prompt, and what is new of it


@dataclass(slots=True)
class Terms:
    """On what terms a request runs, besides its parameters."""

    priority: int = 0
    timeout: float | None = None
    user: str | None = None  # for the log


@dataclass(slots=True, eq=False)
class Run:
    state: ServerState
    call: Call
    prompts: Sequence[TokensPrompt]
    params: SamplingParams
    terms: Terms = field(default_factory=Terms)
    num_prompt_tokens: int = 0
    num_generated: int = 0  # for all completions, those that best_of drops among them
    num_unreturned: int = 0  # of these, for the ones that were dropped
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens found in the cache, by request of the engine
    first_token: float | None = None  # seconds after arrival
    reasons: list[str] = field(default_factory=list)  # how its completions ended
    ids: list[str] = field(default_factory=list)  # of the engine's requests
    cancelled: bool = False  # by its client
    engine: AsyncLLM = field(init=False)  # asked for once: while the server drains, no new request gets it
    _last_token: float = 0.0
    _uncounted: Uncounted = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.state.engine
        lengths = [len(prompt["prompt_token_ids"]) for prompt in self.prompts]
        self.num_prompt_tokens = sum(lengths)
        config = self.engine.config
        self._uncounted = Uncounted(self.params, lengths, config.model.max_model_len, config.scheduler.stream_interval)
        most = self.state.config.request_timeout
        if most is not None:
            self.terms.timeout = most if self.terms.timeout is None else min(most, self.terms.timeout)

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())

    # ------------------------------------------------------------ the outputs

    async def outputs(self) -> Outputs:
        """As they come. Whatever ends this generator ends the request."""
        self._check()
        self.state.limits.admit(self.call.key, self.num_prompt_tokens, len(self.prompts))
        self.state.began(self)
        request_log.arrived(self)
        error: ApiError | None = None
        source = self._source()
        try:
            async for index, output in source:
                self._note(output)
                yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            error = ApiError(499, "the client went away", "disconnect")
            raise
        except Exception as raised:
            error = as_api_error(_as_clients_know_it(raised))
            raise error from raised
        finally:
            await source.aclose()
            self._end(error)

    async def whole(self) -> list[RequestOutput]:
        """The last output of every prompt."""
        last: dict[int, RequestOutput] = {}
        source = self.outputs()
        try:
            async for index, output in source:
                last[index] = output
        finally:
            await source.aclose()
        return [last[index] for index in range(len(self.prompts))]

    async def abort(self) -> None:
        """End it from outside; its outputs end with finish_reason "abort"."""
        await self.engine.abort(self.ids)

    async def cancel(self) -> None:
        """The same because its client wants it."""
        self.cancelled = True
        await self.abort()

    def _source(self) -> Outputs:
        number = next(_numbers)
        self.ids = [f"{number}-{index}" for index in range(len(self.prompts))]
        key, terms = self.call.key, self.terms
        parts = [
            self.engine.generate(
                prompt,
                self.params,
                request_id,
                priority=terms.priority,
                tenant=key.name,
                weight=key.weight,
                timeout=terms.timeout,
            )
            for prompt, request_id in zip(self.prompts, self.ids, strict=True)
        ]
        return _only(parts[0]) if len(parts) == 1 else merged(parts)

    # ------------------------------------------------------------ checks

    def _check(self) -> None:
        check_sizes(self.params)
        asked, most = len(self.prompts) * self.params.num_branches, self.state.config.max_choices
        if asked > most:
            message = f"{asked} completions are asked for at once; this server gives at most {most}."
            raise RequestError(message, self._many)
        policy = self.engine.config.scheduler.scheduling_policy
        if self.terms.priority and policy != "priority" and ":" not in policy:
            message = f"priority needs --scheduling-policy priority; this server orders its queue by {policy}."
            raise RequestError(message, "priority")

    @property
    def _many(self) -> str:
        """The parameter that makes this request large."""
        if self.params.num_branches < len(self.prompts):
            return "prompt"
        return "n" if self.params.best_of is None else "best_of"

    def check(self, output: RequestOutput) -> None:
        """Raise what ended a request that has no answer to show for it."""
        for each in output.outputs:
            if each.finish_reason == "error":
                raise ApiError(500, str(each.stop_reason or "The request failed."), "engine", code="request_failed")
            if each.finish_reason == "timeout" and self.num_generated == 0:
                raise timed_out(self.terms.timeout, str(each.stop_reason or ""))
            if each.finish_reason == "abort" and not self.cancelled:
                raise ApiError(503, "The server was shut down before the answer was complete.", "draining")

    # ------------------------------------------------------------ counting

    def _note(self, output: RequestOutput) -> None:
        """Called for every token, so it touches plain numbers only."""
        new = 0
        for each in output.outputs:
            new += len(each.token_ids)
        if output.num_cached_tokens:
            self.cached[output.request_id] = output.num_cached_tokens
        if new:
            self.num_generated += new
            tally = self.state.metrics.tally
            tally.generated += new
            if self.params.output_kind is RequestOutputKind.DELTA:
                now = time.time()
                if self.first_token is None:
                    self.first_token = now - self.call.arrived
                elif len(self.prompts) == 1:
                    tally.gap(now - self._last_token, new)
                self._last_token = now
        if output.finished:
            self._note_end(output)

    def _note_end(self, output: RequestOutput) -> None:
        cached, times = output.num_cached_tokens or 0, output.metrics
        if self.first_token is None and times is not None:
            self.first_token = times.time_to_first_token
        self._uncounted.ended(output)
        if times is not None and times.num_unreturned_tokens:
            self.num_unreturned += times.num_unreturned_tokens
            self.num_generated += times.num_unreturned_tokens
            self.state.metrics.tally.generated += times.num_unreturned_tokens
        generated = times.num_generation_tokens if times is not None else 0
        self.state.metrics.ended(times, len(output.prompt_token_ids), cached, generated)
        for each in output.outputs:
            if each.finish_reason is not None:
                self.reasons.append(each.finish_reason)
                self.state.metrics.finished(each.finish_reason)

    def _end(self, error: ApiError | None) -> None:
        self.state.ended(self)
        is_disconnect = error is not None and error.cause == "disconnect"
        left_early = is_disconnect or "abort" in self.reasons
        self.state.limits.release(self.call.key, self.num_generated + (self._uncounted.num_tokens if left_early else 0))
        if error is not None and not (is_disconnect and self.reasons):  # who leaves after the end fails nothing
            self.state.metrics.failed(error.cause)
            error.counted = True
        request_log.ended(self, error)

    def usage(self) -> Usage:
        returned = self.num_generated - self.num_unreturned  # which is what OpenAI counts
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=returned,
            total_tokens=self.num_prompt_tokens + returned,
        )
        if self.state.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=self.num_cached)
        return usage


def _as_clients_know_it(error: Exception) -> Exception:
    """The engine's extra_args have another name over HTTP, which is vLLM's."""
    if isinstance(error, RequestError) and error.parameter == "extra_args":
        return RequestError(str(error).replace("extra_args", "vllm_xargs"), "vllm_xargs")
    return error


async def _only(part: AsyncGenerator[RequestOutput, None]) -> Outputs:
    try:
        async for output in part:
            yield 0, output
    finally:
        await part.aclose()


async def merged(parts: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """The outputs of several generators as they come; the first error ends them all."""
    pending = {asyncio.ensure_future(anext(part, None)): index for index, part in enumerate(parts)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index, output = pending.pop(future), future.result()
                if output is not None:
                    yield index, output
                    pending[asyncio.ensure_future(anext(parts[index], None))] = index
    finally:
        await _abandon(pending)
        for part in parts:
            await part.aclose()


async def _abandon(futures: Collection[asyncio.Future[RequestOutput | None]]) -> None:
    for future in futures:
        future.cancel()
    if futures:
        await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # somebody has looked at it


# ----------------------------------------------------------------
# What a request is charged for tokens that nobody has counted.
#
# A client that goes away ends its request before the engine has said how much it made of it; were that free, a key's
# tokens_per_minute would bind only those who wait for the answer.


class Uncounted:
    """Of one request with its prompts: tokens that it may generate and that no output has told of."""

    def __init__(self, params: SamplingParams, prompt_lengths: list[int], max_model_len: int, interval: int) -> None:
        self._params = params
        self._max_model_len = max_model_len
        self._interval = params.stream_interval or interval
        self._num_open = len(prompt_lengths)  # prompts whose completions have not ended
        self._most = sum(map(self._most_of, prompt_lengths))

    def ended(self, output: RequestOutput) -> None:
        """All completions of a prompt have ended. One that was aborted is not told of unless it streams."""
        if self._streams or all(each.finish_reason != "abort" for each in output.outputs):
            self._num_open -= 1
            self._most -= self._most_of(len(output.prompt_token_ids))

    @property
    def num_tokens(self) -> int:
        """All that was asked for; of a stream only what can have come since its last output."""
        if not self._streams:
            return self._most
        return min(self._most, (self._interval - 1) * self._params.num_branches * self._num_open)

    @property
    def _streams(self) -> bool:
        """Whether its tokens are told of as they come; a search tells only of those that are settled."""
        return self._params.output_kind is RequestOutputKind.DELTA and not self._params.use_beam_search

    def _most_of(self, prompt_length: int) -> int:
        room = max(0, self._max_model_len - prompt_length)
        asked = room if self._params.max_tokens is None else min(room, self._params.max_tokens)
        return asked * self._params.num_branches


# ----------------------------------------------------------------
# How much of the event loop's time and memory one request may take by its parameters alone.
#
# Stop strings are looked for in every piece of text, and every beginning of one is kept; a pattern of repetitions costs
# a comparison for each of its lengths at every token, and every log-probability asked for is written at every token.
# Offline that is the caller's own affair; here others wait.

MOST_STOPS = 64
LONGEST_STOP = 1024  # characters
MOST_BAD_WORDS = 1024
LONGEST_BAD_WORD = 1024
LONGEST_PATTERN = 256  # tokens
MOST_NAMED_LOGPROBS = 1024  # written for every token


def check_sizes(params: SamplingParams) -> None:
    _check_texts("stop", params.stop, MOST_STOPS, LONGEST_STOP)
    _check_texts("bad_words", params.bad_words, MOST_BAD_WORDS, LONGEST_BAD_WORD)
    if len(params.logprob_token_ids or ()) > MOST_NAMED_LOGPROBS:
        message = f"logprob_token_ids may have at most {MOST_NAMED_LOGPROBS} entries on a server."
        raise RequestError(message, "logprob_token_ids")
    detection = params.repetition_detection
    if detection is not None and detection.max_pattern_size > LONGEST_PATTERN:
        message = f"repetition_detection.max_pattern_size may be at most {LONGEST_PATTERN} on a server."
        raise RequestError(message, "repetition_detection")


def _check_texts(name: str, texts: str | list[str] | None, most: int, longest: int) -> None:
    if len(texts or ()) > most:
        raise RequestError(f"{name} may have at most {most} entries on a server.", name)
    if any(len(text) > longest for text in texts or ()):
        raise RequestError(f"An entry of {name} may have at most {longest} characters on a server.", name)
