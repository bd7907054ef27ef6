"""Turns the engine's outputs into callers' outputs: text, stop strings, log-probabilities, finish reasons. API process.

Runs for every streamed token, so a step touches only the requests in it, and outputs share the growing lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvasir.errors import EngineError, RequestError
from kvasir.frontend.requests.choices import BeamState, Branches
from kvasir.frontend.requests.logprobs import LogprobLine, by_line
from kvasir.frontend.requests.pooling import PooledState, by_key
from kvasir.frontend.requests.state import Ending, RequestState
from kvasir.frontend.text.detokenizer import decode_finished
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.log import get_logger
from kvasir.messages import LOGPROBS, POOLING_TASKS, PROMPT_LOGPROBS, BeamOutput, EngineOutput, Finished, FinishReason
from kvasir.outputs import RequestMetrics, RequestOutput
from kvasir.sampling_params import RequestOutputKind

logger = get_logger(__name__)


@dataclass(slots=True, frozen=True)
class StopAbort:
    """A stop string has ended a request: the core must abort it and keep this many output tokens."""

    key: int
    num_tokens_kept: int


@dataclass(slots=True, frozen=True)
class BrokenRequest:
    """A request whose output could not be handled. The core must abort its keys, and the caller gets the error."""

    request_id: str
    keys: list[int]
    error: EngineError


class OutputProcessor:
    """Turns EngineOutputs into RequestOutputs, for all requests of one API process."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.metrics = FrontendMetrics()
        self._broken: list[BrokenRequest] = []
        self._states: dict[int, RequestState] = {}
        self._branches: dict[int, Branches] = {}  # of requests with several completions, by the key of each
        self._searches: dict[int, BeamState] = {}
        self._requests: dict[str, RequestState | Branches | BeamState] = {}  # by request id

    def add(self, *states: RequestState, num_returned: int = 1) -> None:
        """Register a request, which may have several completions, before the core gets it."""
        first = states[0]
        if first.request_id in self._requests:
            raise RequestError(f"A request with the id {first.request_id!r} is running already.", "request_id")
        for state in states:
            assert state.key not in self._states, f"request key {state.key} is in use"
            state.attach(self.tokenizer)
            self._states[state.key] = state
        self._requests[first.request_id] = first
        if len(states) > 1:
            self._requests[first.request_id] = branches = Branches(states, num_returned)
            self._branches.update((state.key, branches) for state in states)

    def add_search(self, search: BeamState) -> None:
        """Register a beam search."""
        state = search.state
        if state.kind is RequestOutputKind.DELTA:
            state.attach(self.tokenizer)
        self._searches[state.key] = self._requests[state.request_id] = search

    def __len__(self) -> int:
        return len(self._requests)

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def process(self, output: EngineOutput, now: float) -> tuple[list[RequestOutput], list[StopAbort]]:
        """The outputs of a step, and the requests that the core must abort because of a stop string."""
        step = _Step()
        aborts: list[StopAbort] = []
        for start in output.started:
            if (begun := self._of_key(start.key)) is not None:
                begun.start(start)
        ended = {finished.key: finished for finished in output.finished if finished.key in self._states}
        parts = output.parts
        lines = by_line(parts[LOGPROBS]) if LOGPROBS in parts else {}
        prompt_lines = by_line(parts[PROMPT_LOGPROBS]) if PROMPT_LOGPROBS in parts else {}
        pooled = [by_key(part) for name, part in parts.items() if name in POOLING_TASKS]
        tokens, counts = output.token_ids.tolist(), output.counts.tolist()
        for line, key in enumerate(output.keys.tolist()):
            state = self._states.get(key)
            if state is None:  # it has ended here, and the core does not know yet
                continue
            try:
                for found in pooled:
                    if line in found and isinstance(state, PooledState):
                        state.add_pooled(*found[line])
                if line in prompt_lines:
                    state.add_prompt_logprobs(prompt_lines[line], self.tokenizer)
                if not counts[line]:
                    continue
                end = ended.get(key)
                ending = self._take(state, tokens[line][: counts[line]], lines.get(line, []), end, now)
                if ending is not None:
                    if ended.pop(key, None) is None:
                        aborts.append(StopAbort(key, len(state.token_ids)))
                    if ending.reason != "stop":  # a stop string has already cut the text
                        self._complete_text(state)
                    self._finish(state, ending, now, step)
                elif end is None and state.is_due:
                    if key not in self._branches:
                        step.results.append(state.output([state.completion(0, None)], False))
                    else:
                        step.touch(self._branches[key])
            except Exception as error:  # a fault in one request's output must not end the others
                self._break(state, error, step)
        self._finish_all([end for end in ended.values() if end.key in self._states], now, step)
        self._take_beams(output.beams, now, step)
        for end in (end for end in output.finished if end.key in self._searches):  # by its deadline or an error
            search = self._searches[end.key]
            try:
                step.results.append(search.end(Ending(str(end.reason), end.error)))
                self._close_search(search, str(end.reason), now)
            except Exception as error:
                self._break(search.state, error, step)
        return self._outputs(step), aborts

    def _outputs(self, step: _Step) -> list[RequestOutput]:
        found = step.results
        for branches in step.touched.values():
            try:
                if (output := branches.output()) is not None:
                    found.append(output)
            except Exception as error:
                self._break(branches.states[0], error)
        return found

    def take_broken(self) -> list[BrokenRequest]:
        """Return the requests whose outputs could not be handled since the last call. They have ended here."""
        broken, self._broken = self._broken, []
        return broken

    def _break(self, state: RequestState, error: Exception, step: _Step | None = None) -> None:
        """End a request whose output could not be handled."""
        logger.exception("An output of request %r could not be handled, so the request fails", state.request_id)
        request = self._requests.pop(state.request_id, state)
        states = request.states if isinstance(request, Branches) else [state]
        for each in states:
            self._states.pop(each.key, None)
            self._branches.pop(each.key, None)
        self._searches.pop(state.key, None)
        if step is not None:
            step.forget(state.request_id, request)
        self.metrics.finished["error"] += 1
        said = EngineError(f"an output could not be handled: {type(error).__name__}: {error}")
        self._broken.append(BrokenRequest(state.request_id, [each.key for each in states], said))

    def states_of(self, request_id: str) -> Sequence[RequestState]:
        """The completions of a request that has not ended."""
        request = self._requests.get(request_id)
        if request is None or isinstance(request, Branches):
            return [] if request is None else request.states
        return [request.state if isinstance(request, BeamState) else request]

    def _of_key(self, key: int) -> RequestState | None:
        search = self._searches.get(key)
        return self._states.get(key) if search is None else search.state

    def _take_beams(self, beams: Sequence[BeamOutput], now: float, step: _Step) -> None:
        for beam in beams:
            search = self._searches.get(beam.key)
            if search is None:
                continue
            try:
                given = search.take(beam, self.tokenizer, now)
                if given is not None:
                    step.results.append(given)
                if beam.finished:
                    reason = "stop" if beam.hypotheses[0].stop_token_id is not None else "length"
                    self._close_search(search, reason, now)
            except Exception as error:
                self._break(search.state, error, step)

    def _close_search(self, search: BeamState, reason: str, now: float) -> None:
        state = search.state
        del self._searches[state.key], self._requests[state.request_id]
        state.metrics.finished_time = now
        state.metrics.num_generation_tokens = len(state.token_ids)
        self.metrics.observe(state.metrics, len(state.prompt_token_ids), state.num_cached or 0, reason)

    def _take(
        self, state: RequestState, tokens: list[int], lines: list[LogprobLine], end: Finished | None, now: float
    ) -> Ending | None:
        """Add new tokens to a request; return its ending if they end it."""
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        state.metrics.last_token_time = now
        num_before = len(state.token_ids)
        ending = state.take(tokens, len(tokens) - _hides_last(state, end))
        if lines:
            state.add_logprobs(lines[: len(state.token_ids) - num_before], self.tokenizer)
        return ending

    def _finish_all(self, ended: Sequence[Finished], now: float, step: _Step) -> None:
        """The last outputs of requests that the core has ended. Unstreamed text is detokenized here, in one batch."""
        pairs = [(self._states[end.key], end) for end in ended]
        for state, end in pairs:
            if end.token_ids is not None:
                state.token_ids = end.token_ids.tolist()
            if end.first_token is not None:
                state.set_token_times(end.first_token, now)
        try:
            self._detokenize(pairs)
            batched = True
        except Exception:
            batched = False  # one of them breaks it: which one is found below
        for state, end in pairs:
            try:
                if not batched:
                    self._detokenize([(state, end)])
                stop = state.flush()
                ending = Ending(str(end.reason), _stop_reason(state, end)) if stop is None else Ending("stop", stop)
                self._finish(state, ending, now, step)
            except Exception as error:
                self._break(state, error, step)

    def _detokenize(self, ended: list[tuple[RequestState, Finished]]) -> None:
        if self.tokenizer is None:
            return
        groups: dict[tuple[bool, bool, frozenset[str]], list[tuple[RequestState, Finished]]] = {}
        for state, end in ended:
            if state.detokenizer is None and state.detokenize:
                how = state.skip_special_tokens, state.spaces_between_special_tokens, state.keep_special_tokens
                groups.setdefault(how, []).append((state, end))
        for how, group in groups.items():
            ids = [(s.prompt_token_ids, s.token_ids[: len(s.token_ids) - _hides_last(s, end)]) for s, end in group]
            for (state, _), text in zip(group, decode_finished(self.tokenizer, ids, *how), strict=True):
                state.pieces = [text]

    def _complete_text(self, state: RequestState) -> None:
        self._detokenize([(state, Finished(state.key, FinishReason.STOP, None, None))])
        state.flush()

    def _finish(self, state: RequestState, ending: Ending, now: float, step: _Step) -> None:
        del self._states[state.key]
        branches = self._branches.pop(state.key, None)
        is_first = branches is None or state is branches.states[0]
        state.metrics.finished_time = now
        state.metrics.num_generation_tokens = len(state.token_ids)
        num_prompt_tokens = (
            len(state.prompt_token_ids) if is_first else 0
        )  # several completions count their prompt once
        self.metrics.observe(state.metrics, num_prompt_tokens, (state.num_cached or 0) * is_first, ending.reason)
        if branches is None:
            del self._requests[state.request_id]
            step.results.append(state.output([state.completion(0, ending)], True))
            return
        branches.end(state, ending)
        if branches.finished:
            del self._requests[state.request_id]
        step.touch(branches)

    def withdraw(self, key: int) -> str | None:
        """Remove a request that the core refused, by the key of any completion; return its id if it was running."""
        state = self._of_key(key)
        if state is None:
            return None
        self._searches.pop(key, None)
        request = self._requests.pop(state.request_id)
        branches = request.states if isinstance(request, Branches) else [state]
        for each in branches:
            self._states.pop(each.key, None)
            self._branches.pop(each.key, None)
        return state.request_id

    def abort(
        self, request_ids: Iterable[str], now: float, reason: FinishReason = FinishReason.ABORT
    ) -> list[tuple[list[int], RequestOutput]]:
        """End requests: for each that was running, the keys that the core must abort and the last output."""
        aborted = []
        for request_id in dict.fromkeys(request_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            if isinstance(request, BeamState):
                self._close_search(request, str(reason), now)
                aborted.append(([request.state.key], request.end(Ending(str(reason), None))))
                continue
            keys = [request.key] if isinstance(request, RequestState) else request.running()
            step = _Step()
            self._finish_all([Finished(key, reason, None, None) for key in keys], now, step)
            aborted += [(keys, output) for output in self._outputs(step)]  # none if it has failed just now
        return aborted


class _Step:
    """Collects the outputs of a step. A request with several completions has one output for all of them."""

    def __init__(self) -> None:
        self.results: list[RequestOutput] = []
        self.touched: dict[int, Branches] = {}

    def touch(self, branches: Branches) -> None:
        self.touched[id(branches)] = branches

    def forget(self, request_id: str, request: object) -> None:
        """Drop the outputs of a request that has failed meanwhile."""
        self.results = [each for each in self.results if each.request_id != request_id]
        self.touched.pop(id(request), None)


def _hides_last(state: RequestState, end: Finished | None) -> bool:
    """Whether the last token is a stop token, which the text does not show."""
    return end is not None and end.stop_token_id is not None and not state.include_stop


def _stop_reason(state: RequestState, end: Finished) -> int | str | None:
    if end.error is not None:
        return end.error
    return None if end.stop_token_id in state.eos_token_ids else end.stop_token_id


# ---------------------------------------------------------------- totals


@dataclass(slots=True)
class FrontendMetrics:
    """What the API process counts of finished requests since its start; `snapshot` has vLLM's names."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    first_token: tuple[int, float] = (0, 0.0)  # number of requests, total seconds
    queue: tuple[int, float] = (0, 0.0)
    latency: tuple[int, float] = (0, 0.0)

    def observe(self, metrics: RequestMetrics, num_prompt_tokens: int, num_cached_tokens: int, reason: str) -> None:
        """Add a finished request."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        self.finished[reason] += 1
        self.first_token = _plus(self.first_token, metrics.time_to_first_token)
        self.queue = _plus(self.queue, metrics.time_in_queue)
        self.latency = _plus(self.latency, metrics.latency)

    def snapshot(self) -> dict[str, float]:
        counts = {f"request_success_{reason}": float(count) for reason, count in sorted(self.finished.items())}
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            **counts,
            "time_to_first_token_seconds_count": self.first_token[0],
            "time_to_first_token_seconds_sum": self.first_token[1],
            "request_queue_time_seconds_count": self.queue[0],
            "request_queue_time_seconds_sum": self.queue[1],
            "e2e_request_latency_seconds_count": self.latency[0],
            "e2e_request_latency_seconds_sum": self.latency[1],
        }


def _plus(total: tuple[int, float], seconds: float | None) -> tuple[int, float]:
    return total if seconds is None else (total[0] + 1, total[1] + seconds)
