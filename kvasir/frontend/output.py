"""What a step of the engine becomes for callers: text, stop strings, logprobs, finish reasons. API process.

Runs for every streamed token, so a step touches only the requests that are in it, and outputs share the growing lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvasir.errors import RequestError
from kvasir.frontend.detokenizer import Detokenizer, incremental, whole
from kvasir.frontend.metrics import FrontendMetrics
from kvasir.frontend.stop import StopStrings
from kvasir.frontend.tokenizer import Tokenizer
from kvasir.messages import EngineOutput, Finished, FinishReason, Logprobs
from kvasir.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SampleLogprobs
from kvasir.sampling_params import RequestOutputKind

# One token's line of a step's logprobs: ids and values, the sampled token's first, and the sampled token's rank.
LogprobLine = tuple[list[int], list[float], int]


@dataclass(slots=True, frozen=True)
class StopAbort:
    """A stop string ended a request: the core is to abort it and keep so many of its output tokens."""

    key: int
    num_tokens_kept: int


@dataclass(slots=True, eq=False)
class RequestState:
    """A running request as the API process knows it. Made by InputProcessor, kept by OutputProcessor."""

    key: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    min_tokens: int = 0
    num_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop: bool = False  # in the text
    stops: StopStrings | None = None
    eos_token_ids: frozenset[int] = frozenset()  # tokens at which it ends without a stop_reason

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # text not given out yet; all of it unless outputs are deltas
    logprobs: SampleLogprobs = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_emitted: int = 0  # tokens already given out, where outputs are deltas
    detokenizer: Detokenizer | None = None  # None: no text, or all of it at the end

    def attach(self, tokenizer: Tokenizer | None) -> None:
        """Detokenize step by step if somebody follows the text."""
        follows = self.stops is not None or self.kind is not RequestOutputKind.FINAL_ONLY
        if tokenizer is not None and self.detokenize and follows:
            self.detokenizer = incremental(tokenizer, self.prompt_token_ids, self.skip_special_tokens)

    def take(self, token_ids: Sequence[int], num_with_text: int) -> str | None:
        """Append sampled tokens, of which the last may have no text, up to the one that completes a stop string."""
        if self.detokenizer is None:
            self.token_ids.extend(token_ids)
            return None
        for i, token in enumerate(token_ids):
            self.token_ids.append(token)
            if i < num_with_text and (stop := self._show(self.detokenizer.push(token))) is not None:
                return stop
        return None

    def _show(self, piece: str) -> str | None:
        stop = None
        if self.stops is not None:
            piece, stop = self.stops.feed(piece, len(self.token_ids) > self.min_tokens)
        if piece:
            self.pieces.append(piece)
        return stop

    def flush(self) -> str | None:
        """Show what was waiting for more text. That may complete a stop string, too."""
        if self.detokenizer is None:
            return None
        stop = self._show(self.detokenizer.flush())
        if self.stops is not None and stop is None:
            self.pieces.append(self.stops.flush())
        return stop

    def add_logprobs(self, lines: Iterable[LogprobLine], tokenizer: Tokenizer | None) -> None:
        assert self.num_logprobs is not None, "this request asked for no logprobs"
        text = tokenizer.token_text if tokenizer is not None and self.detokenize else lambda token: None
        for ids, values, rank in lines:
            entry = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
            for place in range(1, 1 + self.num_logprobs):
                if ids[place] != ids[0]:
                    entry[ids[place]] = Logprob(values[place], place, text(ids[place]))
            self.logprobs.append(entry)
            self.cumulative_logprob += values[0]

    def output(self, finish_reason: str | None, stop_reason: int | str | None, num_cached: int | None) -> RequestOutput:
        """What there is to give out now."""
        text, token_ids, logprobs = "".join(self.pieces), self.token_ids, self.logprobs
        if self.kind is RequestOutputKind.DELTA:
            token_ids, logprobs = token_ids[self.num_emitted :], logprobs[self.num_emitted :]
            self.num_emitted = len(self.token_ids)
            self.pieces = []
        else:
            self.pieces = [text]
        asked = self.num_logprobs is not None
        completion = CompletionOutput(
            0,
            text,
            token_ids,
            self.cumulative_logprob if asked else None,
            logprobs if asked else None,
            finish_reason,
            stop_reason,
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            None,
            [completion],
            finish_reason is not None,
            self.metrics,
            num_cached_tokens=num_cached,
        )


class OutputProcessor:
    """Turns EngineOutputs into RequestOutputs, for all requests of one API process."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.metrics = FrontendMetrics()
        self._states: dict[int, RequestState] = {}
        self._keys: dict[str, int] = {}

    def add(self, state: RequestState) -> None:
        """Expect output of this request. Call before the core gets it."""
        assert state.key not in self._states, f"request key {state.key} is in use"
        if state.request_id in self._keys:
            raise RequestError(f"A request with the id {state.request_id!r} is running already.", "request_id")
        state.attach(self.tokenizer)
        self._states[state.key] = state
        self._keys[state.request_id] = state.key

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def process(self, output: EngineOutput, now: float) -> tuple[list[RequestOutput], list[StopAbort]]:
        """Everything to give out after a step, and the requests that the core must abort because of a stop string."""
        results: list[RequestOutput] = []
        aborts: list[StopAbort] = []
        ended = {finished.key: finished for finished in output.finished if finished.key in self._states}
        lines = _lines(output.logprobs)
        tokens, counts = output.token_ids.tolist(), output.counts.tolist()
        for line, key in enumerate(output.keys.tolist()):
            state = self._states.get(key)
            if state is None:  # ended here, and the core had not heard of it yet
                continue
            end = ended.get(key)
            stop = self._take(state, tokens[line][: counts[line]], lines.get(line, []), end, now)
            if stop is not None:
                if ended.pop(key, None) is None:
                    aborts.append(StopAbort(key, len(state.token_ids)))
                results.append(self._finish(state, "stop", stop, end, now))
            elif end is None and state.kind is not RequestOutputKind.FINAL_ONLY:
                results.append(state.output(None, None, None))
        results += self._finish_all(list(ended.values()), now)
        return results, aborts

    def _take(
        self, state: RequestState, tokens: list[int], lines: list[LogprobLine], end: Finished | None, now: float
    ) -> str | None:
        """Give a request its new tokens; return the stop string that they complete."""
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        state.metrics.last_token_time = now
        num_before = len(state.token_ids)
        stop = state.take(tokens, len(tokens) - _hides_last(state, end))
        if state.num_logprobs is not None:
            state.add_logprobs(lines[: len(state.token_ids) - num_before], self.tokenizer)
        return stop

    def _finish_all(self, ended: list[Finished], now: float) -> list[RequestOutput]:
        """The last outputs of requests that the core has ended. Texts nobody followed are made here, all at once."""
        pairs = [(self._states[end.key], end) for end in ended]
        for state, end in pairs:
            if end.token_ids is not None:
                state.token_ids = end.token_ids.tolist()
        self._detokenize(pairs)
        results = []
        for state, end in pairs:
            stop = state.flush()
            if stop is not None:
                results.append(self._finish(state, "stop", stop, end, now))
            else:
                results.append(self._finish(state, str(end.reason), _stop_reason(state, end), end, now))
        return results

    def _detokenize(self, ended: list[tuple[RequestState, Finished]]) -> None:
        if self.tokenizer is None:
            return
        waiting = [(state, end) for state, end in ended if state.detokenizer is None and state.detokenize]
        for skip in {state.skip_special_tokens for state, _ in waiting}:
            group = [(state, end) for state, end in waiting if state.skip_special_tokens is skip]
            ids = [(s.prompt_token_ids, s.token_ids[: len(s.token_ids) - _hides_last(s, end)]) for s, end in group]
            for (state, _), text in zip(group, whole(self.tokenizer, ids, skip), strict=True):
                state.pieces = [text]

    def _finish(
        self, state: RequestState, reason: str, stop_reason: int | str | None, end: Finished | None, now: float
    ) -> RequestOutput:
        del self._states[state.key]
        del self._keys[state.request_id]
        num_cached = None if end is None else end.num_cached_tokens
        state.metrics.finished_time = now
        state.metrics.num_generation_tokens = len(state.token_ids)
        self.metrics.observe(state.metrics, len(state.prompt_token_ids), num_cached or 0, reason)
        return state.output(reason, stop_reason, num_cached)

    def abort(self, request_ids: Iterable[str], now: float) -> list[tuple[int, RequestOutput]]:
        """End requests here: the key that the core is to abort, and the last output, for each that was running."""
        keys = [self._keys[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._keys]
        outputs = self._finish_all([Finished(key, FinishReason.ABORT, None, 0, None) for key in keys], now)
        for output in outputs:
            output.num_cached_tokens = None  # only the core knows
        return list(zip(keys, outputs, strict=True))


def _hides_last(state: RequestState, end: Finished | None) -> bool:
    """Whether the last token is a stop token, which has no place in the text."""
    return end is not None and end.stop_token_id is not None and not state.include_stop


def _stop_reason(state: RequestState, end: Finished) -> int | None:
    return None if end.stop_token_id in state.eos_token_ids else end.stop_token_id


def _lines(logprobs: Logprobs | None) -> dict[int, list[LogprobLine]]:
    """Logprobs by the line of tokens they belong to, in token order."""
    lines: dict[int, list[LogprobLine]] = {}
    if logprobs is not None:
        arrays = (logprobs.index, logprobs.token_ids, logprobs.values, logprobs.ranks)
        for line, ids, values, rank in zip(*(array.tolist() for array in arrays), strict=True):
            lines.setdefault(line, []).append((ids, values, rank))
    return lines
