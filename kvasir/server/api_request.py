"""One request of a client on its way through the engine: its prompts, its outputs, its log lines, and its end.

A request may have several prompts; each of them is a request of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.entrypoints.async_llm import AsyncLLM, Stream
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests.pooling import PoolingParams
from kvasir.frontend.requests.prompts import PromptProcessor, PromptType, TextPrompt, TokenizedPrompt, TokensPrompt
from kvasir.log import get_logger
from kvasir.messages import LEFT_GRAMMAR
from kvasir.outputs import RequestOutput
from kvasir.parsers.base import PartReader, ReasoningReader
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.answers import PLAIN_ANSWER, ChatAnswer, RequestTools
from kvasir.server.body_limits import exceeded_by_texts
from kvasir.server.constraints import constrain
from kvasir.server.errors import ApiError, as_api_error, timed_out, too_large
from kvasir.server.http import Call
from kvasir.server.large_bodies import check_logprobs, check_repeated, num_logprobs
from kvasir.server.limits import TokenAccount, check_limits
from kvasir.server.schema.base import CompletionTokensDetails, PromptTokensDetails, Usage
from kvasir.server.schema.chat import ChatTemplateFields
from kvasir.server.state import ServerState

logger = get_logger("kvasir.server.requests")
MAX_USER_LENGTH = 128  # characters of the user's name that are logged
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
    answer: ChatAnswer = PLAIN_ANSWER  # how its text is read
    model: str | None = None  # the name that the client gave; it may be an adapter's

    parts: PartReader = field(init=False)
    engine: AsyncLLM = field(init=False)  # kept, because ServerState.engine refuses it while the server drains
    tokens: TokenAccount = field(init=False)
    stream: OutputStream = field(init=False)  # the outputs of all prompts, once it has started
    first_token: float | None = None  # seconds after arrival
    reasons: list[str] = field(default_factory=list)  # finish reasons of its completions
    cancelled: bool = False  # by its client
    refusal: ApiError | None = None  # why the server has ended it
    num_done_logprobs: int = 0  # of prompts that are done, while others are not
    ids: list[str] = field(default_factory=list)  # of the engine's requests
    _streams: list[Stream] = field(default_factory=list)
    _merged: MergedStream | None = None
    _last_token: float = 0.0
    _is_admitted: bool = False

    def __post_init__(self) -> None:
        self.engine = self.state.engine
        self.parts = self.answer.reader(self.engine.input_processor.tokenizer)
        config = self.engine.config
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        self.tokens = TokenAccount(self.params, lengths, config.model.max_model_len, config.scheduler.stream_interval)
        self.timeout = self.state.time_limit(self.timeout)

    @property
    def asked(self) -> SamplingParams | PoolingParams:
        """What the engine is asked for."""
        return self.params

    # ------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Check this server's limits, take what the key allows, and hand the prompts to the engine."""
        check_limits(self.params, len(self.prompts), self.state.config.max_choices)
        if (num_completions := len(self.prompts) * self.params.num_branches) > 1:
            check_repeated(self.params, num_completions)
        if self.params.logprobs is not None or self.params.prompt_logprobs is not None:
            check_logprobs(self.params, len(self.prompts), self.tokens.num_prompt, self.engine.config.model)
        key = self.call.key
        self.state.limits.admit(key, self.tokens.num_prompt, len(self.prompts))
        self._is_admitted = True
        self.state.began(self)
        _log_arrival(self)
        number = next(_numbers)
        self.ids = [f"{number}-{index}" for index in range(len(self.prompts))]
        terms: dict[str, Any] = {"priority": self.priority, "tenant": key.name, "weight": key.weight}
        terms |= {"timeout": self.timeout, "arrival_time": self.call.arrived}
        if self.model is not None and self.model not in self.state.model_names:
            self.state.check_model(self.model)  # it may have been unloaded meanwhile
            terms["lora_request"] = self.state.adapters.get(self.model)
        async with within(self.state, self.call, self.timeout):  # a paused engine takes no requests
            for prompt, request_id in zip(self.prompts, self.ids, strict=True):
                self._streams.append(await self.engine.add_request(request_id, prompt, self.asked, **terms))
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
        """Run to the end; return the last output of every prompt, or raise why there is no answer."""
        last: dict[str, RequestOutput] = {}
        async with self.ending():
            await self.start()
            while (output := await self.stream.next()) is not None:
                self.take(output)
                last[output.request_id] = output
            for output in last.values():
                self.check(output)  # in this block, so that the request is logged as what it was
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
        if self.refusal is not None:
            raise self.refusal
        for each in output.outputs:
            if each.finish_reason == "error":
                said = str(each.stop_reason or "The request failed.")
                if said.startswith(LEFT_GRAMMAR):
                    raise ApiError(400, said, "invalid_request", "structured_outputs")
                raise ApiError(500, said, "engine", code="request_failed")
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
            if self.params.output_kind is RequestOutputKind.DELTA:
                now = time.time()
                if self.first_token is None:
                    self.first_token = now - self.call.arrived
                elif len(self.prompts) == 1:
                    self.state.metrics.tally.gap(now - self._last_token, new)
                self._last_token = now
        if output.finished:
            self._take_last(output)

    def _take_last(self, output: RequestOutput) -> None:
        metrics, times = self.state.metrics, output.metrics
        if self.first_token is None and times is not None:
            self.first_token = times.time_to_first_token
        self.tokens.close(output)
        if len(self.ids) > 1:  # others go on, and this answer is kept until they are done
            self.num_done_logprobs += num_logprobs(output, self.params)
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
        self.state.limits.release(self.call.key, self.num_charged(left_early))
        if error is not None and not (disconnected and self.reasons):  # leaving after the end is no failure
            self.state.metrics.failed(error.cause)
            error.counted = True
        _log_end(self, error)

    def num_charged(self, left_early: bool) -> int:
        """Generated tokens that the key is charged."""
        return self.tokens.num_charged(left_early)

    def knows_generated(self, error: ApiError | None) -> bool:
        """Whether the number of generated tokens is known. The engine does not say how many it has made for a request
        that does not stream and is aborted."""
        is_cut = "abort" in self.reasons or (error is not None and error.cause in ("disconnect", "engine"))
        return self.tokens.all_reported or not is_cut

    def usage(self) -> Usage:
        tokens = self.tokens
        usage = Usage(
            prompt_tokens=tokens.num_prompt,
            completion_tokens=tokens.num_returned,
            total_tokens=tokens.num_prompt + tokens.num_returned,
        )
        if self.state.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=tokens.num_cached)
        if isinstance(self.parts, ReasoningReader):
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=self.parts.num_reasoning_tokens)
        return usage


@asynccontextmanager
async def within(state: ServerState, call: Call, timeout: float | None) -> AsyncIterator[None]:
    """End this block with a 504 when the request's time is up."""
    limit = state.time_limit(timeout)
    try:
        async with asyncio.timeout(None if limit is None else limit - (time.time() - call.arrived)):
            yield
    except TimeoutError:
        raise timed_out(limit) from None


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


# ---------------------------------------------------------------- the log: two lines per request


def _log_arrival(request: ApiRequest) -> None:
    metrics, params, call = request.state.metrics, request.params, request.call
    if request.asked is params:  # requests to pooling models have no such parameters
        metrics.params_n.observe(params.n)
        if params.max_tokens is not None:
            metrics.params_max_tokens.observe(min(params.max_tokens, request.engine.config.model.max_model_len))
    fields = {
        "request_id": call.id,
        "path": call.path,
        "key": call.log_name,
        "prompt_tokens": request.tokens.num_prompt,
        "user": request.user,
    }
    logger.info(
        "%s arrived: %s, %d prompt tokens, key %s%s",
        *(call.id, call.path, request.tokens.num_prompt, _client(request), _contents(request)),
        extra={"fields": fields},
    )


def _log_end(request: ApiRequest, error: ApiError | None) -> None:
    now = time.time()
    fields = _fields(request, error, now - request.call.arrived)
    facts = [f"{request.tokens.num_prompt} tokens in"]
    if fields["completion_tokens"] is not None:
        facts.append(f"{fields['completion_tokens']} out")
    facts.append(f"{fields['seconds']:.3f} s")
    if (first := fields["time_to_first_token"]) is not None:
        facts.append(f"first token after {first} s")
    if (per_token := fields["time_per_token"]) is not None:
        facts.append(f"{per_token} s per token")
    logger.info(
        "%s ended: %s, %s, key %s%s",
        *(request.call.id, fields["finish_reason"], ", ".join(facts), _client(request)),
        "" if error is None else f": {error.message}",
        extra={"fields": fields},
    )
    if request.state.tracer is not None:
        request.state.tracer.report(request, now, fields)


def _client(request: ApiRequest) -> str:
    """The key's name, and the user that the client names: quoted and cut, as it is text from outside."""
    name, user = request.call.log_name, request.user
    return name if user is None else f"{name}, user {user[:MAX_USER_LENGTH]!r}"


def _contents(request: ApiRequest) -> str:
    config = request.state.config
    if not config.enable_log_requests:
        return ""
    prompts = [prompt.text or prompt.token_ids for prompt in request.prompts]
    return f" {request.params}, prompts: {str(prompts)[: config.max_log_len]}"


def _fields(request: ApiRequest, error: ApiError | None, took: float) -> dict[str, Any]:
    first, tokens, per_token = request.first_token, request.tokens, None
    if first is not None and tokens.num_generated > 1:
        per_token = round((took - first) / (tokens.num_generated - 1), 5)
    return {
        "request_id": request.call.id,
        "path": request.call.path,
        "key": request.call.log_name,
        "user": request.user,
        "finish_reason": ",".join(sorted(set(request.reasons))) if error is None else error.cause,
        "prompt_tokens": tokens.num_prompt,
        "cached_tokens": tokens.num_cached,
        "completion_tokens": tokens.num_generated if request.knows_generated(error) else None,
        "seconds": round(took, 4),
        "time_to_first_token": None if first is None else round(first, 4),
        "time_per_token": per_token,
        "error": None if error is None else error.message,
    }


# ---------------------------------------------------------------- prompts of bodies


async def read_chat(
    state: ServerState,
    body: ChatTemplateFields,
    truncate: int | None = None,
    salt: str | None = None,
    side: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    for_counting: bool = False,
    **variables: Any,
) -> TokenizedPrompt:
    """Render a conversation and tokenize it. `tools` are given as templates read them. `variables` are for the chat
    template, which must read them. `for_counting`: it may be longer than the model's context."""
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        message = "This server takes no chat_template in requests; --trust-request-chat-template allows it."
        raise RequestError(message, "chat_template")
    given = [message.model_dump(exclude_unset=True) for message in body.messages]
    arguments = list(_arguments(given))
    if arguments and (problem := exceeded_by_texts(arguments)):
        raise RequestError(f"The arguments of all tool calls: this JSON {problem}", "messages")
    messages, shown = state.formats.messages(given, tools, body.chat_template)
    size = num_characters([messages, shown, body.documents, body.chat_template_kwargs])
    processor = state.engine.input_processor.prompts
    text = await state.engine.text_pool.run(
        size,
        lambda: processor.render(
            messages,
            chat_template=body.chat_template,
            tools=shown,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs={**state.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
            may_ignore=("tools",),  # clients send them with tool_choice "none", too
            **variables,
        ),
    )
    try:
        special = bool(body.add_special_tokens)
        (prompt,) = await read_prompts(state, [text], special, truncate, salt, side, for_counting)
    except PromptTooLongError as error:
        error.parameter = "messages"  # as in OpenAI's error
        raise
    return prompt


def _arguments(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The arguments of the tool calls of a conversation, which are decoded for the chat template."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function["arguments"]


def answer_of(
    state: ServerState,
    params: SamplingParams,
    tools: RequestTools,
    prompt: TokenizedPrompt,
    body: ChatTemplateFields,
    include_reasoning: bool = True,
    budget: int | None = None,
) -> ChatAnswer:
    """How a conversation's answer is read. Sets what the engine must keep to in `params`, among it the most tokens of
    reasoning (`budget`)."""
    params.thinking_token_budget = budget
    continued = None
    if body.continue_final_message:
        last = body.messages[-1].content
        continued = last if isinstance(last, str) else ""
    answer = ChatAnswer.make(
        state.formats,
        tools,
        prompt,
        chat_template=body.chat_template,
        continued=continued,
        include_reasoning=include_reasoning,
    )
    processor = state.engine.input_processor
    if budget is not None or not answer.is_plain:
        structured = processor.structured
        constrain(answer, params, processor.tokenizer, lambda: structured.markers, structured.style)
    return answer


def num_characters(value: Any) -> int:
    """The characters of all texts in a JSON value, and one for each of its other entries."""
    total, todo = 0, [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, dict):
            todo += each
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        else:
            total += 1
    return total


async def read_prompts(
    state: ServerState,
    given: Sequence[str | list[int]],
    add_special_tokens: bool = True,
    truncate: int | None = None,
    salt: str | None = None,
    side: str | None = None,
    for_counting: bool = False,
) -> list[TokenizedPrompt]:
    """Tokenize and check prompts, each a text or token ids. `side`: where `truncate` removes tokens. `for_counting`:
    they may be longer than the model's context."""
    processor, pool = state.engine.input_processor.prompts, state.engine.text_pool
    side = side or "left"
    if for_counting:
        processor = processor.for_counting()
    sizes = list(_sizes(state, processor, given, truncate, side, pool.max_characters))
    prompts: list[PromptType] = []
    for each in given:
        prompt = TextPrompt(prompt=each) if isinstance(each, str) else TokensPrompt(prompt_token_ids=each)
        if salt is not None:
            prompt["cache_salt"] = salt
        prompts.append(prompt)
    try:
        found = await pool.run(sum(sizes), lambda: processor.read_all(prompts, add_special_tokens, truncate, side))
    except PromptTooLongError as error:
        check_length(state, error.num_tokens or 0)
        raise
    for read in found if not for_counting else ():
        check_length(state, len(read.token_ids))
    return found


def _sizes(
    state: ServerState,
    processor: PromptProcessor,
    given: Sequence[str | list[int]],
    truncate: int | None,
    side: str,
    most: int,
) -> Iterator[int]:
    """How many characters of each prompt will be tokenized; an error if they are too many, before any of them is."""
    for each in given:
        if not isinstance(each, str):
            if truncate is None and len(each) > processor.max_tokens:
                check_length(state, len(each))
            yield len(each)
            continue
        size = len(processor.cut(each, truncate, side))
        if size > most and not processor.cannot_fit(each, truncate):
            message = f"The prompt has {size} characters that must be tokenized at once"
            raise too_large(f"{message}; this server takes {most} (--max-tokenizing-characters).", "prompt")
        yield size


def check_length(state: ServerState, num_tokens: int) -> None:
    allowed = state.config.max_prompt_tokens
    if allowed is not None and num_tokens > allowed:
        raise too_large(f"The prompt has {num_tokens} tokens; this server takes {allowed} (--max-prompt-tokens).")
