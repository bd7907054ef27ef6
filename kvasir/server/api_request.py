"""One request of a client on its way through the engine: limits, prompts, accounting, and its end however it comes.

A request may have several prompts; each of them is a request of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.clients.stream import Stream
from kvasir.frontend.requests.prompts import PromptType, TextPrompt, TokenizedPrompt, TokensPrompt, off_loop
from kvasir.outputs import RequestOutput
from kvasir.parsers import PartReader
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server import request_log
from kvasir.server.errors import ApiError, as_api_error, timed_out, too_large
from kvasir.server.http import Call
from kvasir.server.schema.base import PromptTokensDetails, Usage
from kvasir.server.schema.chat import ChatTemplateFields
from kvasir.server.state import ServerState

_numbers = itertools.count()


class OutputStream(Protocol):
    """Outputs of the engine, as they come."""

    async def next(self) -> RequestOutput | None:
        """The next output; None after the last."""


@dataclass(slots=True, eq=False)
class ApiRequest:
    """Routes make it of a body, run it by `start` and `stream` inside `ending`, and `take` every output."""

    state: ServerState
    call: Call
    prompts: Sequence[TokenizedPrompt]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    user: str | None = None  # for the log
    names: Mapping[str, str] = field(default_factory=dict)  # this interface's names of the engine's parameters

    parts: PartReader = field(default_factory=PartReader)  # reads the text with the parser chosen for this request
    engine: AsyncLLM = field(init=False)  # kept, because ServerState.engine refuses it while the server drains
    tokens: TokenAccount = field(init=False)
    stream: OutputStream = field(init=False)  # the outputs of all prompts, once it has started
    first_token: float | None = None  # seconds after arrival
    reasons: list[str] = field(default_factory=list)  # finish reasons of its completions
    cancelled: bool = False  # by its client
    ids: list[str] = field(default_factory=list)  # of the engine's requests
    _streams: list[Stream] = field(default_factory=list)
    _merged: MergedStream | None = None
    _last_token: float = 0.0
    _is_admitted: bool = False

    def __post_init__(self) -> None:
        self.engine = self.state.engine
        config = self.engine.config
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        self.tokens = TokenAccount(self.params, lengths, config.model.max_model_len, config.scheduler.stream_interval)
        longest = self.state.config.request_timeout
        if longest is not None:
            self.timeout = longest if self.timeout is None else min(longest, self.timeout)

    # ------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Check this server's limits, take what the key allows, and hand the prompts to the engine."""
        check_limits(self.params, len(self.prompts), self.state.config.max_choices)
        key = self.call.key
        self.state.limits.admit(key, self.tokens.num_prompt, len(self.prompts))
        self._is_admitted = True
        self.state.began(self)
        request_log.arrived(self)
        number = next(_numbers)
        self.ids = [f"{number}-{index}" for index in range(len(self.prompts))]
        terms: dict[str, Any] = {"priority": self.priority, "tenant": key.name, "weight": key.weight}
        for prompt, request_id in zip(self.prompts, self.ids, strict=True):
            added = await self.engine.add_request(request_id, prompt, self.params, timeout=self.timeout, **terms)
            self._streams.append(added)
        if len(self._streams) > 1:
            self._merged = MergedStream(self._streams)
        self.stream = self._merged or self._streams[0]

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """End the request when this block ends: abort what still runs, then count and log how it ended."""
        error: ApiError | None = None
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            error = ApiError(499, "the client disconnected", "disconnect")
            raise
        except Exception as raised:
            error = as_api_error(raised, self.names)
            raise error from raised
        finally:
            if self._merged is not None:
                self._merged.close()
            running = [stream.request_id for stream in self._streams if not stream.finished]
            if running:
                await self.engine.abort(running)
            if self._is_admitted:
                self._end(error)

    async def whole(self) -> list[RequestOutput]:
        """Run to the end; return the last output of every prompt."""
        last: dict[str, RequestOutput] = {}
        async with self.ending():
            await self.start()
            while (output := await self.stream.next()) is not None:
                self.take(output)
                last[output.request_id] = output
        return [last[request_id] for request_id in self.ids]

    async def abort(self) -> None:
        """End it from outside; its outputs end with finish_reason "abort"."""
        await self.engine.abort(self.ids)

    async def cancel(self) -> None:
        """Abort it because its client asks for that."""
        self.cancelled = True
        await self.abort()

    def check(self, output: RequestOutput) -> None:
        """Raise the error that ended a request without an answer."""
        for each in output.outputs:
            if each.finish_reason == "error":
                raise ApiError(500, str(each.stop_reason or "The request failed."), "engine", code="request_failed")
            if each.finish_reason == "timeout" and self.tokens.num_generated == 0:
                raise timed_out(self.timeout, str(each.stop_reason or ""))
            if each.finish_reason == "abort" and not self.cancelled:
                raise ApiError(503, "The server was shut down before the answer was complete.", "draining")

    def choice_of(self, output: RequestOutput, index: int) -> int:
        """The number, in the whole reply, of a prompt's completion."""
        if len(self.ids) == 1:
            return index
        return self.ids.index(output.request_id) * self.params.n + index

    # ------------------------------------------------------------ counting

    def take(self, output: RequestOutput) -> None:
        """Count an output. Runs for every token, so it touches plain numbers only."""
        new = 0
        for each in output.outputs:
            new += len(each.token_ids)
        if output.num_cached_tokens:
            self.tokens.cached[output.request_id] = output.num_cached_tokens
        if new:
            self.tokens.num_generated += new
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
            self._take_last(output)

    def _take_last(self, output: RequestOutput) -> None:
        metrics, times = self.state.metrics, output.metrics
        if self.first_token is None and times is not None:
            self.first_token = times.time_to_first_token
        self.tokens.close(output)
        if times is not None:
            metrics.tally.generated += times.num_unreturned_tokens
        generated = times.num_generation_tokens if times is not None else 0
        metrics.ended(times, len(output.prompt_token_ids), output.num_cached_tokens or 0, generated)
        for each in output.outputs:
            if each.finish_reason is not None:
                self.reasons.append(each.finish_reason)
                metrics.finished(each.finish_reason)

    def _end(self, error: ApiError | None) -> None:
        self.state.ended(self)
        disconnected = error is not None and error.cause == "disconnect"
        left_early = disconnected or "abort" in self.reasons
        self.state.limits.release(self.call.key, self.tokens.num_charged(left_early))
        if error is not None and not (disconnected and self.reasons):  # leaving after the end is no failure
            self.state.metrics.failed(error.cause)
            error.counted = True
        request_log.ended(self, error)

    def usage(self) -> Usage:
        tokens = self.tokens
        usage = Usage(
            prompt_tokens=tokens.num_prompt,
            completion_tokens=tokens.num_returned,
            total_tokens=tokens.num_prompt + tokens.num_returned,
        )
        if self.state.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=tokens.num_cached)
        return usage


class MergedStream:
    """The streams of several prompts as one. The first error of any ends it."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._waiting = {asyncio.ensure_future(stream.next()): stream for stream in streams}
        self._ready: deque[RequestOutput] = deque()

    async def next(self) -> RequestOutput | None:
        while not self._ready and self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                stream, output = self._waiting.pop(future), future.result()
                if output is not None:
                    self._ready.append(output)
                    self._waiting[asyncio.ensure_future(stream.next())] = stream
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        for future in self._waiting:
            if not future.cancel() and not future.cancelled():
                future.exception()  # marks it as retrieved


# ---------------------------------------------------------------- token accounting


class TokenAccount:
    """Tokens of one request: for its usage, and for what its API key is charged.

    A client that disconnects ends its request before the engine has reported all tokens. Those that may have been
    generated are charged too: otherwise tokens_per_minute would bind only clients that wait for the answer.
    """

    def __init__(self, params: SamplingParams, prompt_lengths: list[int], max_model_len: int, interval: int) -> None:
        self.num_prompt = sum(prompt_lengths)
        self.num_generated = 0  # for all completions, also those that best_of drops
        self.num_unreturned = 0  # the part of these for completions that were dropped
        self.cached: dict[str, int] = {}  # prompt tokens found in the prefix cache, by request of the engine
        self._params = params
        self._max_model_len = max_model_len
        self._interval = params.stream_interval or interval
        self._num_running = len(prompt_lengths)  # prompts whose completions have not ended
        self._most_unreported = sum(map(self._most_of, prompt_lengths))

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())

    @property
    def num_returned(self) -> int:
        return self.num_generated - self.num_unreturned

    def close(self, output: RequestOutput) -> None:
        """All completions of a prompt have ended. The tokens of an aborted one are reported only if it streams."""
        if output.metrics is not None:
            self.num_unreturned += output.metrics.num_unreturned_tokens
            self.num_generated += output.metrics.num_unreturned_tokens
        if self._streams or all(each.finish_reason != "abort" for each in output.outputs):
            self._num_running -= 1
            self._most_unreported -= self._most_of(len(output.prompt_token_ids))

    def num_charged(self, left_early: bool) -> int:
        """Generated tokens that the key is charged, with those that may be unreported if the client left early."""
        if not left_early:
            return self.num_generated
        unreported = self._most_unreported
        if self._streams:  # only the tokens since the last output can be unreported
            since_last = (self._interval - 1) * self._params.num_branches * self._num_running
            unreported = min(unreported, since_last)
        return self.num_generated + unreported

    @property
    def _streams(self) -> bool:
        """Whether tokens are reported as they come; a beam search reports only those that cannot change any more."""
        return self._params.output_kind is RequestOutputKind.DELTA and not self._params.use_beam_search

    def _most_of(self, prompt_length: int) -> int:
        room = max(0, self._max_model_len - prompt_length)
        asked = room if self._params.max_tokens is None else min(room, self._params.max_tokens)
        return asked * self._params.num_branches


# ---------------------------------------------------------------- limits of a server
# A request's parameters cost time in the event loop that all requests share: stop strings are searched in all text,
# repetition patterns compared at every token, log-probabilities written for every token. LLM has no such limits.

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 1024
MAX_PATTERN_SIZE = 256  # tokens
MAX_NAMED_LOGPROBS = 1024  # written for every token


def check_limits(params: SamplingParams, num_prompts: int, max_choices: int) -> None:
    _check_texts("stop", params.stop, MAX_STOPS, MAX_STOP_LENGTH)
    _check_texts("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    if len(params.logprob_token_ids or ()) > MAX_NAMED_LOGPROBS:
        message = f"logprob_token_ids may have at most {MAX_NAMED_LOGPROBS} entries on a server."
        raise RequestError(message, "logprob_token_ids")
    detection = params.repetition_detection
    if detection is not None and detection.max_pattern_size > MAX_PATTERN_SIZE:
        message = f"repetition_detection.max_pattern_size may be at most {MAX_PATTERN_SIZE} on a server."
        raise RequestError(message, "repetition_detection")
    num_choices = num_prompts * params.num_branches
    if num_choices > max_choices:
        name = "n" if params.best_of is None else "best_of"
        message = f"The request asks for {num_choices} completions; this server allows {max_choices} (--max-choices)."
        raise RequestError(message, "prompt" if params.num_branches < num_prompts else name)


def _check_texts(name: str, texts: str | list[str] | None, most: int, longest: int) -> None:
    if len(texts or ()) > most:
        raise RequestError(f"{name} may have at most {most} entries on a server.", name)
    if any(len(text) > longest for text in texts or ()):
        raise RequestError(f"An entry of {name} may have at most {longest} characters on a server.", name)


# ---------------------------------------------------------------- prompts of bodies


async def read_chat(
    state: ServerState,
    body: ChatTemplateFields,
    truncate: int | None = None,
    salt: str | None = None,
    **variables: Any,
) -> TokenizedPrompt:
    """Render a conversation and tokenize it. `variables` are for the chat template, which must read them."""
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        message = "This server takes no chat_template in requests; --trust-request-chat-template allows it."
        raise RequestError(message, "chat_template")
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    size = sum(len(str(message.get("content"))) for message in messages)
    processor = state.engine.input_processor.prompts
    text = await off_loop(
        size,
        lambda: processor.render(
            messages,
            chat_template=body.chat_template,
            tools=body.tools,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
            may_ignore=("tools",),  # clients send them with tool_choice "none", too
            **variables,
        ),
    )
    (prompt,) = await read_prompts(state, [text], bool(body.add_special_tokens), truncate, salt)
    return prompt


async def read_prompts(
    state: ServerState,
    given: Sequence[str | list[int]],
    add_special_tokens: bool = True,
    truncate: int | None = None,
    salt: str | None = None,
) -> list[TokenizedPrompt]:
    """Tokenize and check prompts, each a text or token ids."""
    prompts: list[PromptType] = []
    for each in given:
        prompt = TextPrompt(prompt=each) if isinstance(each, str) else TokensPrompt(prompt_token_ids=each)
        if salt is not None:
            prompt["cache_salt"] = salt
        prompts.append(prompt)
    processor = state.engine.input_processor.prompts
    size = sum(len(each) for each in given if isinstance(each, str))
    try:
        found = await off_loop(size, lambda: processor.read_all(prompts, add_special_tokens, truncate))
    except PromptTooLongError as error:
        _check_length(state, error.num_tokens or 0)
        raise
    for read in found:
        _check_length(state, len(read.token_ids))
    return found


def _check_length(state: ServerState, num_tokens: int) -> None:
    allowed = state.config.max_prompt_tokens
    if allowed is not None and num_tokens > allowed:
        raise too_large(f"The prompt has {num_tokens} tokens; this server takes {allowed} (--max-prompt-tokens).")
