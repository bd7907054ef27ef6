"""Turns what a caller asks for into an EngineRequest, or raises a RequestError: the core gets only valid requests.

API process. Settles what depends on the model (end tokens, lengths, seeds) and checks all parameters; prompts.py does
the same for prompts. LLM, AsyncLLM and the server share it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.config.speculative import read_speculative
from kvasir.engine.guides import BUDGET_GUIDE, budget_argument
from kvasir.errors import ConfigError, ModelError, RequestError
from kvasir.frontend.requests.choices import BeamState, as_beam_search, fork
from kvasir.frontend.requests.embeddings import with_embeddings
from kvasir.frontend.requests.extras import UNSET, ExtrasBuilder
from kvasir.frontend.requests.pooling import PoolingParams, PoolingProcessor
from kvasir.frontend.requests.prompts import PromptProcessor, PromptType
from kvasir.frontend.requests.state import RequestState
from kvasir.frontend.requests.structured import StructuredOutputs, find_eos_token_ids, jumps_are_exact
from kvasir.frontend.text.stop import Repetitions, StopStrings
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.lora.host import Adapter, with_adapter
from kvasir.messages import EngineRequest, RowSampling, Terms
from kvasir.outputs import RequestMetrics
from kvasir.sampling_params import RequestOutputKind, SamplingParams

_GREEDY_BELOW = 1e-5  # smaller temperatures select the likeliest token, and could overflow
# Sampling parameters in a generation config, with our names.
_GENERATION_NAMES = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


class InputProcessor:
    """Validates requests for one engine."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, remote: bool = False) -> None:
        """`remote`: the core is in another process."""
        self.config = config.model
        self.stream_interval = config.scheduler.stream_interval
        self.tokenizer = tokenizer
        self.prompts = PromptProcessor(config.model, tokenizer)
        self.extras = ExtrasBuilder(config.model, tokenizer, config.parallel.tensor_parallel_size, remote)
        self.eos_token_ids = find_eos_token_ids(config.model, tokenizer)
        self.structured = StructuredOutputs(config.model, tokenizer)
        drafting = read_speculative(config.model.speculative_config)
        self.num_drafts = 0 if drafting is None else drafting.num_speculative_tokens
        self.pooling = PoolingProcessor(config.model, self.prompts)
        try:
            _sampling_of(config.model.override_generation_config)  # otherwise every request would report it
        except RequestError as error:
            raise ConfigError(f"override_generation_config has a wrong value: {error}") from error

    def check_generates(self) -> None:
        """Raise RequestError for a model that pools."""
        if self.config.poolers:
            tasks = ", ".join(pooler.task for pooler in self.config.poolers)
            raise RequestError(
                f"this model does not generate text: it is a pooling model ({tasks}). Use its embeddings, scores or "
                f"classes, or another model."
            )

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        key: int,
        arrival_time: float,
        adapter: Adapter | None = None,
    ) -> tuple[EngineRequest, RequestState]:
        """The request for the core, and its state for OutputProcessor."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"Sampling parameters must be SamplingParams, not {type(params).__name__}.")
        self.check_generates()
        params.verify()
        tokenized = self.prompts.read(prompt)
        ids = tokenized.token_ids
        if not ids:
            raise RequestError("The prompt is empty: it must have at least one token.", "prompt")
        max_tokens = self._max_tokens(len(ids), params)
        stop_ids = self._stop_token_ids(params)
        self._check_needs(params, stop_ids)
        sampling = self._row_sampling(params, key, len(ids), stop_ids)
        structured = params.structured_outputs
        followed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        watched = bool(params.stop) or params.repetition_detection is not None
        request = EngineRequest(
            key,
            tokenized.array,
            max_tokens,
            sampling,
            stream=followed or watched or sampling.logprobs is not None,
            cache_salt=tokenized.salt,
            needs_last_token=sampling.extras is not None and bool(sampling.extras.processors),
            reads_cache=not params.skip_reading_prefix_cache and params.prompt_logprobs is None,
            min_tokens=max(1, params.min_tokens) if stop_ids or watched or structured is not None else max_tokens,
            guide=self._guide(params, sampling),
            num_drafts=self.num_drafts,
        )
        if tokenized.embeddings is not None:
            request = with_embeddings(request, tokenized.embeddings, adapter, params)
        if adapter is not None:
            request = with_adapter(request, adapter, params, self.config.max_model_len)
        state = self.state(key, request_id, tokenized.text, ids, params, arrival_time)
        if adapter is not None:
            state.lora_request, state.num_virtual = adapter.request, adapter.num_virtual_tokens
        return request, state

    def state(
        self, key: int, request_id: str, text: str | None, ids: list[int], params: SamplingParams, arrival_time: float
    ) -> RequestState:
        """The state of a request for OutputProcessor."""
        named = params.logprob_token_ids
        detection = params.repetition_detection
        return RequestState(
            key,
            request_id,
            text,
            ids,
            RequestMetrics(arrival_time),
            kind=params.output_kind,
            min_tokens=params.min_tokens,
            num_logprobs=len(dict.fromkeys(named)) if named else self._count("logprobs", params.logprobs),
            named_logprobs=bool(named),
            num_prompt_logprobs=self._count("prompt_logprobs", params.prompt_logprobs),
            flat_logprobs=params.flat_logprobs,
            detokenize=params.detokenize,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            keep_special_tokens=frozenset(params.keep_special_tokens or ()),
            include_stop=params.include_stop_str_in_output,
            stops=StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None,
            repetitions=Repetitions(detection) if detection is not None and detection.max_pattern_size else None,
            stream_interval=params.stream_interval or self.stream_interval,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
        )

    def _guide(self, params: SamplingParams, sampling: RowSampling) -> tuple[str, Any] | None:
        """Return the guide for the request's tokens: its grammar, within the budget of its reasoning."""
        structured, budget, marks = params.structured_outputs, params.thinking_token_budget, params.reasoning_tokens
        inner = None if structured is None else self.structured.guide(structured, sampling)
        if budget is None or marks is None:
            return inner
        jumps = self.structured.may_jump and jumps_are_exact(sampling)
        return BUDGET_GUIDE, budget_argument(budget, marks.opening, marks.closing, marks.begun, inner, jumps=jumps)

    # ------------------------------------------------------------ parameters

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = self.config.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            message = f"min_tokens={params.min_tokens} cannot be reached: this prompt leaves room for {room} tokens."
            raise RequestError(message, "min_tokens")
        return max_tokens

    def _check_needs(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
        if params.stop and self.tokenizer is None:
            message = "stop strings need a tokenizer, and skip_tokenizer_init=True loads none: use stop_token_ids."
            raise RequestError(message, "stop")
        if params.min_tokens or params.forbidden_token_ids or params.allowed_token_ids is not None:
            self.extras.check_possible(params, stop_ids)

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own, size = params.stop_token_ids or [], self.config.vocab_size
        for token in own:
            if token >= size:
                message = f"stop_token_ids has {token}, but the model's vocabulary ends at {size - 1}."
                raise RequestError(message, "stop_token_ids")
        eos: Iterable[int] = () if params.ignore_eos else sorted(self.eos_token_ids)
        return tuple(dict.fromkeys([*own, *eos]))

    def _row_sampling(
        self, params: SamplingParams, key: int, num_prompt_tokens: int, stop_ids: tuple[int, ...]
    ) -> RowSampling:
        # min_tokens forbids the tokens that would end the request; under ignore_eos the model's end tokens do not.
        banned_until = num_prompt_tokens + params.min_tokens if params.min_tokens else 0
        is_plain = not self.extras.has_startup and all(getattr(params, name) in unset for name, unset in UNSET)
        extras = None if is_plain else self.extras.build(params, key, num_prompt_tokens)
        logprobs = 0 if params.logprob_token_ids else self._count("logprobs", params.logprobs)
        if params.temperature < _GREEDY_BELOW:  # the other settings do not change the likeliest token
            return RowSampling(logprobs=logprobs, banned_until=banned_until, stop_token_ids=stop_ids, extras=extras)
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k if 0 < params.top_k < self.config.vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self._seed(params.seed, key),
            logprobs=logprobs,
            banned_until=banned_until,
            stop_token_ids=stop_ids,
            extras=extras,
        )

    def _count(self, name: str, asked: int | None) -> int | None:
        return None if asked is None else self.extras.count(name, asked)

    def _seed(self, asked: int | None, key: int) -> int:
        """A 32-bit seed: the request's own, or one made of the engine's seed and the request's key."""
        if asked is not None and asked != -1:  # -1 means unset, as in vLLM
            return fold(asked)
        return mix(fold(key) ^ mix(fold(self.config.seed)))

    @staticmethod
    def fork_seed(seed: int, index: int) -> int:
        """The seed of a request's completion number `index`, if the first has `seed`."""
        return mix(seed ^ mix(index))


def default_sampling_params(config: EngineConfig) -> SamplingParams:
    """The parameters of a request that gives none: the model's generation config over our defaults."""
    try:
        return _sampling_of(config.model.generation)
    except RequestError as error:
        raise ModelError(f"The model's generation config has a wrong value: {error}") from error


def _sampling_of(generation: dict[str, Any]) -> SamplingParams:
    """Return the parameters that a generation config sets."""
    given = {ours: generation.get(theirs) for theirs, ours in _GENERATION_NAMES.items()}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def process_all(
    processor: InputProcessor,
    request_id: str,
    prompt: PromptType,
    params: SamplingParams | PoolingParams,
    keys: Iterator[int],
    arrival_time: float,
    terms: Terms | None = None,
    adapter: Adapter | None = None,
) -> tuple[EngineRequest, list[RequestState] | BeamState]:
    """Process a request with all completions that it asks for."""
    if isinstance(params, PoolingParams):
        if adapter is not None:
            raise RequestError("Adapters are for models that generate text; leave lora_request out.", "lora_request")
        request, pooled = processor.pooling.process(request_id, prompt, params, next(keys), arrival_time, terms)
        return request, [pooled]
    request, state = processor.process(request_id, prompt, params, next(keys), arrival_time, adapter)
    request = request if terms is None else replace(request, terms=terms)
    if params.use_beam_search:
        return as_beam_search(processor, request, params), BeamState(state, params.n, params.num_branches)
    if params.num_branches > 1:
        return fork(processor, request, state, params, keys, arrival_time)
    return request, [state]


# ---------------------------------------------------------------- seeds

_MASK32 = 0xFFFFFFFF


def fold(number: int) -> int:
    """Fold 64 bits to 32. Numbers below 2**32 stay as they are."""
    return (number & _MASK32) ^ mix((number >> 32) & _MASK32)


def mix(number: int) -> int:
    """A bijection of 32 bits (the last step of murmur3) that separates neighbours; 0 stays 0."""
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & _MASK32
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & _MASK32
    return number ^ (number >> 16)


# ---------------------------------------------------------------- priority, tenant, deadline

_WITHOUT_PRIORITIES = ("fair", "fcfs", "wrr", "deadline")
WEIGHTS = 1e-3, 1e3  # smallest and largest: with others, the tokens served to tenants would lose precision
_LARGEST_PRIORITY = 2**53  # the queue compares priorities as floats


def make_terms(
    policy: str,
    *,
    arrival_time: float | None = None,  # of time.time; None: now
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    timeout: float | None = None,  # seconds from its arrival
) -> Terms:
    """Check how a request is to be scheduled. What has no effect under the engine's `policy` is refused."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > _LARGEST_PRIORITY:
        raise RequestError(f"priority must be a whole number of at most 53 bits, not {priority!r}.", "priority")
    if priority and policy in _WITHOUT_PRIORITIES:
        raise RequestError(
            f"priority={priority} has no effect under scheduling_policy={policy}; leave it out, or start the engine "
            f"with scheduling_policy=priority.",
            "priority",
        )
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, not {type(tenant).__name__}.", "tenant")
    now = time.monotonic()
    arrival = now if arrival_time is None else min(now, now - (time.time() - arrival_time))
    deadline = None if timeout is None else arrival + _positive("timeout", timeout)
    return Terms(arrival, priority, tenant, _weight(weight), deadline)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise RequestError(f"{name} must be a number above 0, not {value!r}.", name)
    return float(value)


def _weight(value: Any) -> float:
    least, most = WEIGHTS
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"weight must be a number from {least:g} to {most:g}, not {value!r}.", "weight")
    return float(value)
