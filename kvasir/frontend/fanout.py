"""Requests that have several completions: branches that fork from one prompt, or a beam search. API process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from kvasir.errors import RequestError
from kvasir.frontend.beams import BeamState
from kvasir.frontend.input import InputProcessor, mix
from kvasir.frontend.state import RequestState
from kvasir.messages import BeamSpec, EngineRequest, Extras, Terms
from kvasir.prompts import PromptType
from kvasir.sampling_params import RequestOutputKind, SamplingParams

# What sampling parameters may say of a search; all others must be left alone.
_MAY_BE_SET = {
    *("n", "best_of", "max_tokens", "ignore_eos", "stop_token_ids", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "temperature"),
    *("skip_reading_prefix_cache", "use_beam_search", "length_penalty", "early_stopping"),
    *("num_beam_groups", "diversity_penalty"),
}


def process_all(
    processor: InputProcessor,
    request_id: str,
    prompt: PromptType,
    params: SamplingParams,
    keys: Iterator[int],
    arrival_time: float,
    terms: Terms | None = None,
) -> tuple[EngineRequest, list[RequestState] | BeamState]:
    """As InputProcessor.process, for all completions that are asked for."""
    request, state = processor.process(request_id, prompt, params, next(keys), arrival_time)
    request = request if terms is None else replace(request, terms=terms)
    if params.use_beam_search:
        return _searched(processor, request, params), BeamState(state, params.n, params.num_branches)
    if params.num_branches == 1:
        return request, [state]
    if params.num_branches > params.n:
        request = _ranked(processor, request, params)
    others = params.clone()
    others.prompt_logprobs = None  # the first one has them
    states, forks = [state], []
    for index in range(1, params.num_branches):
        key = next(keys)
        states.append(processor.state(key, request_id, state.prompt, state.prompt_token_ids, others, arrival_time))
        forks.append(_fork(request, key, index))
    return replace(request, forks=tuple(forks)), states


def _fork(request: EngineRequest, key: int, index: int) -> EngineRequest:
    """Another completion of the same prompt, with a random stream of its own."""
    sampling = request.sampling
    extras = sampling.extras
    if extras is not None:
        extras = replace(extras, prompt_logprobs=None, ema_key=key if extras.top_ema_p else 0)
        extras = None if extras == Extras(extras.num_prompt_tokens) else extras
    return replace(request, key=key, sampling=replace(sampling, seed=mix(sampling.seed ^ mix(index)), extras=extras))


def _ranked(processor: InputProcessor, request: EngineRequest, params: SamplingParams) -> EngineRequest:
    """With the log-probabilities that the best are found by."""
    if params.output_kind is not RequestOutputKind.FINAL_ONLY:
        message = "best_of more than n cannot be streamed, as the best are known at the end: use FINAL_ONLY."
        raise RequestError(message, "best_of")
    _need_logprobs(processor, "best_of")
    sampling = replace(request.sampling, logprobs=request.sampling.logprobs or 0)
    return replace(request, sampling=sampling, stream=True)


def _searched(processor: InputProcessor, request: EngineRequest, params: SamplingParams) -> EngineRequest:
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
    """Refuse, by name, what a beam search cannot do."""
    for f in fields(params):
        value = getattr(params, f.name)
        if f.name not in _MAY_BE_SET and value not in (f.default, []):
            raise RequestError(f"{f.name}={value!r} does not go with use_beam_search; leave it out.", f.name)
    if params.temperature not in (0, 1):
        raise RequestError("temperature must be 0 or 1 with use_beam_search: a search samples nothing.", "temperature")
    if params.num_branches % params.num_beam_groups:
        message = f"num_beam_groups={params.num_beam_groups} does not divide the {params.num_branches} beams."
        raise RequestError(message, "num_beam_groups")
