"""From a request's fields to SamplingParams: what is unset comes from the model's generation config."""

from __future__ import annotations

from typing import Any

from kvasir.errors import RequestError
from kvasir.frontend.requests.input import default_sampling_params
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from kvasir.server.api_request import Terms
from kvasir.server.http import GOOD_ID, Call, is_good_id
from kvasir.server.schema.base import Body
from kvasir.server.schema.sampling import SAMPLING_FIELDS, Sampling
from kvasir.server.state import ServerState

_DEFAULTED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")  # by a generation config


def sampling_params(
    state: ServerState, body: Body, *, max_tokens: int | None, logprobs: int | None, stream: bool
) -> SamplingParams:
    """Wrong values raise a RequestError that names the field. Bodies need not have all fields."""
    _check_top_logprobs(state, getattr(body, "top_logprobs", None))
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name, None)) is not None}
    _check_stream(given, stream)
    if not given.get("use_beam_search"):  # a search samples nothing
        defaults = state_defaults(state)
        given = {**{name: getattr(defaults, name) for name in _DEFAULTED}, **given}
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        extra_args=getattr(body, "vllm_xargs", None),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _check_top_logprobs(state: ServerState, asked: int | None) -> None:
    """By the name that clients gave it: the engine knows it as logprobs."""
    most = state.engine.config.model.max_logprobs
    if asked is not None and asked > most >= 0:
        message = f"top_logprobs={asked} is more than this server gives: --max-logprobs is {most}."
        raise RequestError(message, "top_logprobs")


def _check_stream(given: dict[str, Any], stream: bool) -> None:
    """What only a stream can do, or only an answer that is whole."""
    if "stream_interval" in given and not stream:
        message = "stream_interval is for streams: set stream to true or leave it out."
        raise RequestError(message, "stream_interval")
    drops_some = given.get("best_of", 1) > given.get("n", 1) and not given.get("use_beam_search")
    if stream and drops_some:
        message = (
            "best_of more than n does not go with stream, as the best are known at the end: leave one of them out."
        )
        raise RequestError(message, "best_of")


def state_defaults(state: ServerState) -> SamplingParams:
    if state.defaults is None:
        state.defaults = default_sampling_params(state.engine.config)
    return state.defaults


def default_max_tokens(state: ServerState, otherwise: int | None) -> int | None:
    """What a request gets that names no limit: the generation config's, or else `otherwise`."""
    configured: Any = state.engine.config.model.generation.get("max_new_tokens")
    return state_defaults(state).max_tokens if configured is not None else otherwise


def take_id(call: Call, body: Sampling) -> None:
    """The id that a body gives its request is the one that its reply, its header and the log's lines have."""
    if body.request_id is None:
        return
    if not is_good_id(body.request_id):
        raise RequestError(f"request_id {GOOD_ID}", "request_id")
    call.id = body.request_id


def terms(body: Sampling, user: str | None = None) -> Terms:
    return Terms(body.priority or 0, body.timeout, user)
