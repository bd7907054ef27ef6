"""Limits of the server: the rates of API keys, the tokens that a request is charged, the memory of bodies, the sizes
of parameters."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.errors import RequestError
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_keys import ApiKey
from kvasir.server.errors import ApiError

# ---------------------------------------------------------------- rates of keys


class Bucket:
    """A token bucket: it fills at a steady rate up to one minute's amount, and its level may fall below zero."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.rate = per_minute / 60
        self.capacity = max(per_minute, 1.0)
        self.level = self.capacity
        self._clock = clock
        self._at = clock()

    def wait(self, amount: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if that is more than its capacity."""
        now = self._clock()
        self.level = min(self.capacity, self.level + (now - self._at) * self.rate)
        self._at = now
        return max(0.0, (min(amount, self.capacity) - self.level) / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    max_running: float | None
    running: int = 0


class RateLimits:
    """The use of all keys in this process. Each of several API processes allows its share of every limit."""

    def __init__(self, num_processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = 1 / num_processes
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, key: ApiKey, num_tokens: int, num_requests: int = 1) -> None:
        """Take what a request needs, or raise a 429 with the time to wait. `release` must follow when it has ended."""
        account = self._account(key)
        if account.max_running is not None and account.running + 1 > account.max_running:
            raise _limited(key, f"max_concurrent={key.max_concurrent:g}", 1.0)
        for bucket, amount, name in (
            (account.requests, num_requests, f"requests_per_minute={key.requests_per_minute}"),
            (account.tokens, num_tokens, f"tokens_per_minute={key.tokens_per_minute}"),
        ):
            if bucket is not None and (wait := bucket.wait(amount)) > 0:
                raise _limited(key, name, wait)
        for bucket, amount in ((account.requests, num_requests), (account.tokens, num_tokens)):
            if bucket is not None:
                bucket.take(amount)
        account.running += 1

    def release(self, key: ApiKey, num_generated: int) -> None:
        """End a request and charge its generated tokens, returned or not."""
        account = self._account(key)
        account.running -= 1
        if account.tokens is not None:
            account.tokens.take(num_generated)

    def _account(self, key: ApiKey) -> _Account:
        found = self._accounts.get(key.name)
        if found is None:
            found = self._accounts[key.name] = _Account(
                self._bucket(key.requests_per_minute),
                self._bucket(key.tokens_per_minute),
                None if key.max_concurrent is None else max(1.0, key.max_concurrent * self.share),
            )
        return found

    def _bucket(self, per_minute: float | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute * self.share, self._clock)


def _limited(key: ApiKey, limit: str, wait: float) -> ApiError:
    message = f"The key {key.name!r} has reached its limit {limit}; try again in {wait:.1f} s."
    return ApiError(429, message, "rate_limit", code="rate_limit_exceeded", retry_after=wait)


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

    @property
    def all_reported(self) -> bool:
        """Whether `num_generated` has all tokens that the engine has sent or will send. Before its end, a request that
        does not stream has sent none."""
        return self._streams or not self._num_running

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


# ---------------------------------------------------------------- memory of bodies

SMALL_BODY = 64 << 10  # bytes
_PEAK = 32 << 20  # bytes, after which memory is given back to the system


class BodyMemory:
    """Counts the bytes of all bodies that are held in this process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._most = 0  # since memory was given back to the system

    def take(self, count: int, small: bool = False, even_alone: bool = False) -> bool:
        """Whether there was room for `count` bytes more, which are then held. A `small` body may use a reserve, so that
        few large ones do not keep all others out. `even_alone`: a body that is held alone may have any size."""
        room = self.limit + (self.limit // 4 if small else 0) - self.held
        if count > room and not (even_alone and self.held == 0):
            return False
        self.held += count
        self._most = max(self._most, self.held)
        return True

    def give_back(self, count: int) -> None:
        self.held -= count

    def note_peak(self, count: int) -> None:
        """So many bytes were held for other work and are free again."""
        self._most = max(self._most, self.held + count)

    def trim(self) -> None:
        """Give memory back to the system after a peak: the pieces of many bodies leave holes that malloc would keep."""
        if self._most >= _PEAK and self.held < self._most // 4:
            self._most = self.held
            gc.collect()  # errors and their frames refer to each other, and to the body
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
                trim(0)


# ---------------------------------------------------------------- sizes of parameters
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
