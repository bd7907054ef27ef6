"""Bodies that take much memory or time: what replies may repeat, the log-probabilities they keep, how they are sent.

A short request may ask for a reply of gigabytes, or for a large one again and again without reading it. API process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from starlette.types import Message, Send

from kvasir.config.engine import ModelConfig
from kvasir.errors import RequestError
from kvasir.outputs import RequestOutput
from kvasir.platforms.limits import memory_limit
from kvasir.sampling_params import SamplingParams
from kvasir.server.config import ServerConfig
from kvasir.server.errors import ApiError
from kvasir.server.limits import SMALL_BODY, BodyMemory
from kvasir.server.schema.base import encode

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest
    from kvasir.server.state import ServerState

T = TypeVar("T")
_bodies = ThreadPoolExecutor(1, "bodies")  # one, because (de)coding keeps Python's lock from the event loop


async def off_loop(work: Callable[[], T]) -> T:
    """Read or write a large body in the one thread for that, in turn."""
    return await asyncio.get_running_loop().run_in_executor(_bodies, work)


# ---------------------------------------------------------------- what completions repeat

MAX_COPIED_CHARACTERS = 1 << 24  # of prompts that each completion of a reply repeats
MAX_COPIED_TOKENS = 1 << 22
MAX_COPIED_LOGPROBS = 1 << 18


def check_copies(
    name: str, num_copies: int, num_characters: int = 0, num_tokens: int = 0, num_logprobs: int = 0
) -> None:
    """Bound what a reply repeats for each of its completions: a short request could ask for gigabytes. `name`: the
    field that asks for it. The numbers are those of one copy."""
    for count, most, what in (
        (num_characters, MAX_COPIED_CHARACTERS, "characters"),
        (num_tokens, MAX_COPIED_TOKENS, "tokens"),
        (num_logprobs, MAX_COPIED_LOGPROBS, "log-probabilities"),
    ):
        if num_copies > 1 and count * num_copies > most:
            message = f"{name} repeats {count} {what} of the prompt for each of {num_copies} completions; a server "
            message += f"writes {most} in all: ask for fewer completions, or leave {name} out."
            raise RequestError(message, name)


MAX_REPEATED_BYTES = 1 << 24  # of parameters as JSON, in all completions together: each entry takes far more
MAX_REPEATED_GRAMMARS = 1 << 25  # a grammar is compiled once, but each completion follows it
_LISTS = ("logit_bias", "allowed_token_ids", "stop", "bad_words", "stop_token_ids", "logprob_token_ids", "extra_args")


def check_repeated(params: SamplingParams, num_completions: int) -> None:
    """Bound the parameters that every completion has for itself, in this process and in the engine."""
    sizes = {name: len(encode(value)) for name in _LISTS if (value := getattr(params, name))}
    grammar = params.structured_outputs
    grammars = {} if grammar is None else {grammar.source: len(encode(replace(grammar, parts=())))}
    for found, most in ((sizes, MAX_REPEATED_BYTES), (grammars, MAX_REPEATED_GRAMMARS)):
        if sum(found.values()) * num_completions > most:
            name = max(found, key=lambda name: found[name])
            message = f"{name} and other lists have {sum(found.values())} bytes for each of {num_completions} "
            message += f"completions; a server takes {most} in all: ask for fewer completions, or shorten {name}."
            raise RequestError(message, name)


# ---------------------------------------------------------------- log-probabilities

MAX_LOGPROBS = 1 << 18  # of all tokens together, beyond the 20 per token that OpenAI allows
_PLAIN_LOGPROBS = 20
_LOGPROB_BYTES = 250  # that one takes in this process
_MANY_LOGPROBS = 20_000  # that take a tenth of a second to write


def check_logprobs(params: SamplingParams, num_prompts: int, num_prompt_tokens: int, model: ModelConfig) -> None:
    """Bound the log-probabilities of all tokens that a request may have."""
    longest = min(params.max_tokens or model.max_model_len, model.max_model_len)
    generated = longest * params.num_branches * num_prompts
    named = params.logprob_token_ids
    for name, width, num_tokens in (
        ("logprob_token_ids", len(named or ()), generated),
        ("logprobs", 0 if named else params.logprobs or 0, generated),
        ("prompt_logprobs", params.prompt_logprobs or 0, num_prompt_tokens),
    ):
        width = model.vocab_size if width == -1 else width
        if width > _PLAIN_LOGPROBS and width * num_tokens > MAX_LOGPROBS:
            message = (
                f"{name} asks for {width} log-probabilities of up to {num_tokens} tokens; a server gives "
                f"{MAX_LOGPROBS} in all: ask for fewer of each token, or for fewer tokens."
            )
            raise RequestError(message, name)


def num_logprobs(output: RequestOutput, params: SamplingParams) -> int:
    """Approximate number of log-probabilities in an output."""
    width = max(params.logprobs or 0, len(params.logprob_token_ids or ()))
    count = sum(len(each.logprobs or ()) for each in output.outputs) * (1 + width)
    return count + len(output.prompt_logprobs or ()) * (1 + (params.prompt_logprobs or 0))


async def bound_logprobs(state: ServerState) -> None:
    """End the requests with the most log-probabilities while all of them take too much memory. How many a request
    will have is not known before: it may stop early."""
    engine = state.engine_or_none
    if engine is None:
        return
    held = {request: count for request in state.requests if (count := _held_logprobs(request))}
    total, most = sum(held.values()), _most_held(state.config, engine.config.model)
    for request, count in sorted(held.items(), key=lambda item: -item[1]):
        if total <= most:
            return
        total -= count
        if request.refusal is None:
            message = f"The log-probabilities of all running requests are more than the {most} that this server keeps "
            message += "(--max-logprob-memory), and this request has the most: ask for fewer of each token, for fewer "
            message += "tokens or completions."
            request.refusal = ApiError(503, message, "overloaded", "logprobs", retry_after=1.0)
            await request.abort()


def _held_logprobs(request: ApiRequest) -> int:
    """Number of log-probabilities that are kept for an answer."""
    if request.params.logprobs is None and request.params.prompt_logprobs is None:
        return 0
    states = (state for each in request.ids for state in request.engine.output_processor.states_of(each))
    kept = (each for state in states for each in (state.logprobs, state.prompt_logprobs) if each is not None)
    return request.num_done_logprobs + sum(each.num_values for each in kept)


def _most_held(config: ServerConfig, model: ModelConfig) -> int:
    """Most log-probabilities that may be held. One context with OpenAI's most per token is always possible."""
    memory = config.max_logprob_memory or _quarter_of_memory()
    return max(memory // _LOGPROB_BYTES, (1 + _PLAIN_LOGPROBS) * model.max_model_len)


@cache
def _quarter_of_memory() -> int:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(whole, memory_limit() or whole) // 4


async def write_reply(request: ApiRequest, outputs: Sequence[RequestOutput], work: Callable[[], T]) -> T:
    """Make the reply of these outputs, in a thread if they have many log-probabilities."""
    copied = 1 + (request.params.prompt_logprobs or 0)  # of each prompt token, once for each further completion
    size = sum(
        num_logprobs(output, request.params) + (len(output.outputs) - 1) * len(output.prompt_logprobs or ()) * copied
        for output in outputs
    )
    return work() if size < _MANY_LOGPROBS else await off_loop(work)


# ---------------------------------------------------------------- large bodies


class LargeReply:
    """Sends a large body in pieces, as fast as its client reads, and accounts for it until then.

    Otherwise it would wait whole in the connection's buffer, where a few clients that ask for much and read nothing
    fill the memory.
    """

    def __init__(self, start: Message, send: Send, memory: BodyMemory) -> None:
        self.refused: ApiError | None = None  # there is no memory for it, so nothing was sent
        self._start: Message | None = start  # which waits for the body
        self._send = send
        self._memory = memory
        self._num_bytes = 0

    async def send(self, message: Message) -> bool:
        """Send a part of the body. Returns True if the caller may send the part unchanged."""
        body = message.get("body", b"")
        is_whole = len(body) > SMALL_BODY and not message.get("more_body", False)
        # One alone is always sent: it could never be, however often its client asked again.
        if is_whole and not self._memory.take(len(body), even_alone=True):
            self.refused = ApiError(503, "The server has no memory left for replies.", "overloaded", retry_after=1)
            return False
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        if not is_whole:  # a file, which is read piece by piece
            return True
        self._num_bytes += len(body)
        pieces = memoryview(body)
        for at in range(0, len(body), SMALL_BODY):
            more = at + SMALL_BODY < len(body)
            await self._send({"type": message["type"], "body": pieces[at : at + SMALL_BODY], "more_body": more})
        return False

    def give_back(self, bodies: BodyMemory) -> None:
        self._memory.give_back(self._num_bytes)
        bodies.note_peak(self._num_bytes)
