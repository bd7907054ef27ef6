"""Requests that have several completions: branches that fork from one prompt, or a beam search. API process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from kvasir.engine.guides import without_jumps
from kvasir.errors import RequestError
from kvasir.frontend.requests.state import Ending, RequestState
from kvasir.frontend.text.detokenizer import decode_finished
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import BeamOutput, BeamSpec, EngineRequest, Extras, Hypothesis
from kvasir.outputs import CompletionOutput, RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from kvasir.frontend.requests.input import InputProcessor

# Sampling parameters that a beam search supports; all others must have their defaults.
_MAY_BE_SET = {
    *("n", "best_of", "max_tokens", "ignore_eos", "stop_token_ids", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "temperature"),
    *("skip_reading_prefix_cache", "use_beam_search", "length_penalty", "early_stopping"),
    *("num_beam_groups", "diversity_penalty", "keep_special_tokens"),
}


def fork(
    processor: InputProcessor,
    request: EngineRequest,
    state: RequestState,
    params: SamplingParams,
    keys: Iterator[int],
    arrival_time: float,
) -> tuple[EngineRequest, list[RequestState]]:
    """Add the other completions to a request for several."""
    if params.num_branches > params.n:
        request = _ranked(processor, request, params)
    others = params.clone()
    others.prompt_logprobs = None  # the first completion returns them
    states, forks = [state], []
    for index in range(1, params.num_branches):
        key = next(keys)
        states.append(
            processor.state(key, state.request_id, state.prompt, state.prompt_token_ids, others, arrival_time)
        )
        forks.append(_fork(processor, request, key, index))
    return replace(request, forks=tuple(forks)), states


def _fork(processor: InputProcessor, request: EngineRequest, key: int, index: int) -> EngineRequest:
    """Another completion of the same prompt, with its own seed."""
    sampling = request.sampling
    extras = sampling.extras
    if extras is not None:
        extras = replace(extras, prompt_logprobs=None, ema_key=key if extras.top_ema_p else 0)
        extras = None if extras == Extras(extras.num_prompt_tokens) else extras
    seed = processor.fork_seed(sampling.seed, index)
    return replace(request, key=key, embeddings=None, sampling=replace(sampling, seed=seed, extras=extras))


def _ranked(processor: InputProcessor, request: EngineRequest, params: SamplingParams) -> EngineRequest:
    """Request the log-probabilities by which the best completions are chosen."""
    if params.output_kind is not RequestOutputKind.FINAL_ONLY:
        message = "best_of larger than n cannot be streamed, as the best are known at the end: use FINAL_ONLY."
        raise RequestError(message, "best_of")
    _need_logprobs(processor, "best_of")
    sampling = replace(request.sampling, logprobs=request.sampling.logprobs or 0)
    guide = None if request.guide is None else without_jumps(request.guide)
    return replace(request, sampling=sampling, stream=True, guide=guide)


def as_beam_search(processor: InputProcessor, request: EngineRequest, params: SamplingParams) -> EngineRequest:
    """Make a request a beam search."""
    _check_search(params)
    _need_logprobs(processor, "use_beam_search")
    beam = BeamSpec(
        width=params.num_branches,
        num_groups=params.num_beam_groups,
        diversity_penalty=params.diversity_penalty if params.num_beam_groups > 1 else 0.0,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_ids=request.sampling.stop_token_ids,
    )
    return replace(request, beam=beam)


def _need_logprobs(processor: InputProcessor, name: str) -> None:
    mode = processor.config.logprobs_mode
    if mode.endswith("logits"):
        raise RequestError(f"{name} ranks by log-probability, and logprobs_mode={mode} gives logits.", name)


def _check_search(params: SamplingParams) -> None:
    """Refuse parameters that a beam search does not support."""
    for f in fields(params):
        value = getattr(params, f.name)
        if f.name not in _MAY_BE_SET and value not in (f.default, []):
            raise RequestError(f"{f.name}={value!r} cannot be combined with use_beam_search; leave it out.", f.name)
    if params.temperature not in (0, 1):
        raise RequestError("temperature must be 0 or 1 with use_beam_search: a search samples nothing.", "temperature")
    if params.num_branches % params.num_beam_groups:
        message = f"num_beam_groups={params.num_beam_groups} does not divide the {params.num_branches} beams."
        raise RequestError(message, "num_beam_groups")


# ---------------------------------------------------------------- several completions as one output


class Branches:
    """The completions of one request, in order of their indices; the best `num_returned` are returned at the end."""

    def __init__(self, states: Sequence[RequestState], num_returned: int) -> None:
        self.states = list(states)
        self.num_returned = num_returned
        self._endings: dict[int, Ending] = {}  # by key
        self._reported: set[int] = set()  # keys whose end was returned

    @property
    def finished(self) -> bool:
        return len(self._endings) == len(self.states)

    def running(self) -> list[int]:
        return [state.key for state in self.states if state.key not in self._endings]

    def end(self, state: RequestState, ending: Ending) -> None:
        self._endings[state.key] = ending
        times = self.states[0].metrics  # the metrics that are returned for all of them
        times.max_num_generation_tokens = max(times.max_num_generation_tokens, len(state.token_ids))

    def output(self) -> RequestOutput | None:
        """The output to return now, if any. Deltas have only the completions in which something is new."""
        first = self.states[0]
        if first.kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        shown = self.states
        if len(self.states) > self.num_returned:
            shown = self._best()
            first.metrics.num_unreturned_tokens = _num_tokens(self.states) - _num_tokens(shown)
        completions = [self._completion(index, state) for index, state in enumerate(shown) if self._has_output(state)]
        return first.output(completions, self.finished) if completions else None

    def _best(self) -> list[RequestState]:
        ranked = sorted(self.states, key=lambda state: state.cumulative_logprob or 0.0, reverse=True)
        return ranked[: self.num_returned]

    def _has_output(self, state: RequestState) -> bool:
        if state.kind is not RequestOutputKind.DELTA:
            return True
        ended = state.key in self._endings
        return state.key not in self._reported and (
            ended or (state.num_emitted < len(state.token_ids) and state.is_due)
        )

    def _completion(self, index: int, state: RequestState) -> CompletionOutput:
        ending = self._endings.get(state.key)
        if ending is not None:
            self._reported.add(state.key)
        return state.completion(index, ending)


def _num_tokens(states: Sequence[RequestState]) -> int:
    return sum(len(state.token_ids) for state in states)


# ---------------------------------------------------------------- beam search


class BeamState:
    """A beam search as its caller sees it. Cumulative outputs have the best text so far, which may change; deltas have
    text that cannot change any more."""

    def __init__(self, state: RequestState, num_returned: int, width: int) -> None:
        self.state = state
        self.num_returned = num_returned
        self.width = width
        self._num_steps = 0  # each step generates a token for every beam

    def take(self, beam: BeamOutput, tokenizer: Tokenizer | None, now: float) -> RequestOutput | None:
        """The output to return, if any."""
        state = self.state
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        state.metrics.last_token_time = now
        self._num_steps = max(self._num_steps, *(len(text.token_ids) for text in beam.hypotheses))
        if beam.finished:
            return self._last(beam, tokenizer)
        best = beam.hypotheses[0]
        if state.kind is RequestOutputKind.DELTA:
            state.take(best.token_ids[len(state.token_ids) : beam.num_agreed].tolist(), beam.num_agreed)
            new = len(state.token_ids) > state.num_emitted
            return state.output([state.completion(0, None)], False) if new and state.is_due else None
        if len(best.token_ids) - state.num_emitted < state.stream_interval and state.num_emitted:
            return None
        state.num_emitted = len(best.token_ids)
        return state.output([self._whole(0, best, tokenizer, None)], False)

    def _last(self, beam: BeamOutput, tokenizer: Tokenizer | None) -> RequestOutput:
        state, best = self.state, beam.hypotheses[0]
        shown = [
            self._whole(index, text, tokenizer, _ending(state, text))
            for index, text in enumerate(beam.hypotheses[: self.num_returned])
        ]
        if state.kind is RequestOutputKind.DELTA:
            rest = best.token_ids[len(state.token_ids) :].tolist()
            state.take(rest, len(rest) - self._num_hidden(best))
            state.flush()
            shown[0] = state.completion(0, _ending(state, best))
            shown[0].cumulative_logprob = best.cumulative_logprob
        state.token_ids = best.token_ids.tolist()
        self._note_unreturned([len(text.token_ids) for text in beam.hypotheses[: self.num_returned]])
        return state.output(shown, True)

    def end(self, ending: Ending) -> RequestOutput:
        """The last output of an aborted search: the part of its best text that cannot change any more."""
        self._note_unreturned([len(self.state.token_ids)])
        return self.state.output([self.state.completion(0, ending)], True)

    def _note_unreturned(self, returned: list[int]) -> None:
        self.state.metrics.num_unreturned_tokens = max(0, self._num_steps * self.width - sum(returned))

    def _num_hidden(self, text: Hypothesis) -> int:
        """Number of last tokens without text: a stop token is not shown."""
        return int(text.stop_token_id is not None and not self.state.include_stop)

    def _whole(
        self, index: int, text: Hypothesis, tokenizer: Tokenizer | None, ending: Ending | None
    ) -> CompletionOutput:
        state, ids = self.state, text.token_ids.tolist()
        said = ""
        if tokenizer is not None and state.detokenize:
            request = (state.prompt_token_ids, ids[: len(ids) - self._num_hidden(text)])
            how = state.skip_special_tokens, state.spaces_between_special_tokens, state.keep_special_tokens
            (said,) = decode_finished(tokenizer, [request], *how)
        reason, stop_reason = ending or (None, None)
        total = None if ending is None else text.cumulative_logprob
        return CompletionOutput(index, said, ids, total, None, reason, stop_reason)


def _ending(state: RequestState, text: Hypothesis) -> Ending:
    if text.stop_token_id is None:
        return Ending("length", None)
    return Ending("stop", None if text.stop_token_id in state.eos_token_ids else text.stop_token_id)
