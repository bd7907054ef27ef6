"""The two log lines of each request, and the report of its end to the tracer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvasir.log import get_logger
from kvasir.server.errors import ApiError

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest

logger = get_logger("kvasir.server.requests")
MAX_USER_LENGTH = 128  # characters of the user's name that are logged


def arrived(request: ApiRequest) -> None:
    metrics, params, call = request.state.metrics, request.params, request.call
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


def ended(request: ApiRequest, error: ApiError | None) -> None:
    now = time.time()
    fields = _fields(request, error, now - request.call.arrived)
    logger.info(
        "%s ended: %s, %d tokens in, %d out, %.3f s, first token after %s s, %s s per token, key %s%s",
        *(request.call.id, fields["finish_reason"], request.tokens.num_prompt, request.tokens.num_generated),
        *(fields["seconds"], fields["time_to_first_token"] or "-", fields["time_per_token"] or "-", _client(request)),
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
        "completion_tokens": tokens.num_generated,
        "seconds": round(took, 4),
        "time_to_first_token": None if first is None else round(first, 4),
        "time_per_token": per_token,
        "error": None if error is None else error.message,
    }
