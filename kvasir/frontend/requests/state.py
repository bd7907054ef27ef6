"""The state of a running completion in the API process: its tokens, text and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvasir.frontend.requests.logprobs import LogprobLine, LogprobLists, TokenText
from kvasir.frontend.text.detokenizer import Detokenizer, make_detokenizer
from kvasir.frontend.text.stop import Repetitions, StopStrings
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import Started
from kvasir.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvasir.sampling_params import RequestOutputKind


class Ending(NamedTuple):
    """The finish reason and stop reason of a completion."""

    reason: str
    stop_reason: int | str | None


NO_ENDING = (None, None)


@dataclass(slots=True, eq=False)
class RequestState:
    """One completion. InputProcessor makes it, OutputProcessor updates it."""

    key: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    min_tokens: int = 0
    num_logprobs: int | None = None
    named_logprobs: bool = False  # of logprob_token_ids, not of the likeliest tokens
    num_prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    keep_special_tokens: frozenset[str] = frozenset()
    include_stop: bool = False  # keep the stop sequence in the text
    stops: StopStrings | None = None
    repetitions: Repetitions | None = None
    stream_interval: int = 1
    eos_token_ids: frozenset[int] = frozenset()  # end tokens, which are no stop_reason

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text not returned yet; all text unless outputs are deltas
    logprobs: LogprobLists | None = None
    prompt_logprobs: LogprobLists | None = None
    cumulative_logprob: float | None = None
    num_emitted: int = 0  # tokens already returned
    lora_request: Any = None  # handed back with outputs
    num_virtual: int = 0  # tokens of a soft prompt, which stand before the prompt in the cache
    num_cached: int | None = None  # prompt tokens found in the prefix cache, once it is scheduled
    detokenizer: Detokenizer | None = None  # None: no text, or all text at the end

    def __post_init__(self) -> None:
        if self.num_logprobs is not None:
            self.logprobs = LogprobLists(self.num_logprobs, self.named_logprobs, self.flat_logprobs)
        if self.num_prompt_logprobs is not None:
            self.prompt_logprobs = LogprobLists(self.num_prompt_logprobs, flat=self.flat_logprobs)
            self.prompt_logprobs.add_nothing()

    def attach(self, tokenizer: Tokenizer | None) -> None:
        """Detokenize incrementally if text is needed before the end: for outputs, or for stop strings."""
        follows = self.stops is not None or self.kind is not RequestOutputKind.FINAL_ONLY
        if tokenizer is not None and self.detokenize and follows:
            how = self.skip_special_tokens, self.spaces_between_special_tokens, self.keep_special_tokens
            self.detokenizer = make_detokenizer(tokenizer, self.prompt_token_ids, *how)

    def take(self, token_ids: Sequence[int], num_with_text: int) -> Ending | None:
        """Append sampled tokens, up to one that ends the completion. Tokens after `num_with_text` have no text."""
        if self.detokenizer is None and self.repetitions is None:
            self.token_ids.extend(token_ids)
            return None
        for i, token in enumerate(token_ids):
            self.token_ids.append(token)
            if self.detokenizer is not None and i < num_with_text:
                stop = self._show(self.detokenizer.push(token))
                if stop is not None:
                    return Ending("stop", stop)
            if self.repetitions is not None and self.repetitions.feed(token) and len(self.token_ids) > self.min_tokens:
                return Ending("repetition", "repetition_detected")
        return None

    def _show(self, piece: str) -> str | None:
        stop = None
        if self.stops is not None:
            piece, stop = self.stops.feed(piece, len(self.token_ids) > self.min_tokens)
        if piece:
            self.pieces.append(piece)
        return stop

    def flush(self) -> str | None:
        """Add the text that was held back. It may complete a stop string, which is returned."""
        if self.detokenizer is None:
            return None
        stop = self._show(self.detokenizer.flush())
        if self.stops is not None and stop is None:
            self.pieces.append(self.stops.flush())
        return stop

    def add_logprobs(self, lines: Iterable[LogprobLine], tokenizer: Tokenizer | None) -> None:
        text = self._token_text(tokenizer)
        for line in lines:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + line[1][0]
            if self.logprobs is not None:
                self.logprobs.add(line, text)

    def add_prompt_logprobs(self, lines: Iterable[LogprobLine], tokenizer: Tokenizer | None) -> None:
        """Add log-probabilities of prompt tokens. After a preemption some come twice."""
        found = self.prompt_logprobs
        if found is None:  # already returned with the first delta
            return
        text = self._token_text(tokenizer)
        for line in lines:
            if line.position == len(found):
                found.add(line, text)

    def _token_text(self, tokenizer: Tokenizer | None) -> TokenText:
        return tokenizer.token_text if tokenizer is not None and self.detokenize else lambda token: None

    @property
    def is_due(self) -> bool:
        """Whether there are enough new tokens for an output before the end."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return False
        if self.stream_interval == 1 or self.num_emitted == 0:
            return True
        return len(self.token_ids) - self.num_emitted >= self.stream_interval

    def completion(self, index: int, ending: Ending | None) -> CompletionOutput:
        """The completion's part of an output."""
        text, token_ids, logprobs, total = "".join(self.pieces), self.token_ids, None, self.cumulative_logprob
        is_delta = self.kind is RequestOutputKind.DELTA
        if self.logprobs is not None:
            logprobs, total = self.logprobs.take() if is_delta else self.logprobs.entries, total or 0.0
        if is_delta:
            token_ids = token_ids[self.num_emitted :]
            self.pieces = []
        else:
            self.pieces = [text]
        self.num_emitted = len(self.token_ids)
        reason, stop_reason = ending or NO_ENDING
        return CompletionOutput(index, text, token_ids, total, logprobs, reason, stop_reason)

    def start(self, started: Started) -> None:
        self.num_cached = max(0, started.num_cached_tokens - self.num_virtual)
        self.metrics.first_scheduled_time = self.metrics.arrival_time + started.waited

    def set_token_times(self, first_token: float, now: float) -> None:
        """Set the times of an unstreamed request, whose first token came `first_token` seconds after arrival."""
        self.metrics.first_token_time = self.metrics.arrival_time + first_token
        self.metrics.last_token_time = now

    def output(self, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
        prompt_logprobs = self.prompt_logprobs
        if self.kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None  # only the first output has them
        if finished:
            longest = self.metrics.max_num_generation_tokens
            self.metrics.max_num_generation_tokens = max(longest, len(self.token_ids))
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            None if prompt_logprobs is None else prompt_logprobs.entries,  # type: ignore[arg-type]
            completions,
            finished,
            self.metrics,
            lora_request=self.lora_request,
            num_cached_tokens=self.num_cached,
        )
