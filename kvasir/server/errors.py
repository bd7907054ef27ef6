"""What went wrong, as clients are told: a status, OpenAI's error body or Anthropic's, and a cause to count by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvasir.errors import EngineDeadError, EngineError, OverloadedError, RequestError
from kvasir.log import get_logger
from kvasir.server.schema.base import encode
from kvasir.server.schema.usage import ErrorDetail, ErrorReply
from kvasir.server.validation import complaint

logger = get_logger(__name__)


@dataclass(slots=True)
class ApiError(Exception):
    """Raised where a status is known. `cause` is the label it is counted under."""

    status: int
    message: str
    cause: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    allow: tuple[str, ...] = ()  # the methods that would do
    counted: bool = False  # in the metrics

    def __str__(self) -> str:
        return self.message


# OpenAI's and Anthropic's names for kinds of errors, by status.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OPENAI_TYPES |= {504: "timeout_error"}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
}


def unknown_model(name: str, served: list[str]) -> ApiError:
    message = f"The model {name!r} does not exist here. Served: {', '.join(served)}."
    return ApiError(404, message, "not_found", "model", "model_not_found")


def not_found(message: str) -> ApiError:
    return ApiError(404, message, "not_found")


def too_large(message: str, param: str | None = None) -> ApiError:
    return ApiError(413, message, "too_large", param, "too_large")


def timed_out(seconds: float | None, why: str = "") -> ApiError:
    """`why`: the engine's words, if it has any. It may have ended the request long before its time was up."""
    after = "" if seconds is None else f" after {seconds:g} s"
    message = f"The request was ended: {why}." if why else f"The request ran out of time{after}."
    return ApiError(504, message, "timeout", "timeout", "timeout")


def as_api_error(error: Exception) -> ApiError:
    """Whatever was raised, with a status. What nobody expected is a 500, and its traceback is in the log."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            return ApiError(429, str(error), "queue_full", code="queue_full", retry_after=error.retry_after)
        case RequestError():
            return ApiError(400, str(error), "invalid_request", error.parameter)
        case RequestValidationError():
            found = complaint(error.errors())
            return ApiError(400, found.message, "invalid_request", found.param)
        case HTTPException():
            cause = {401: "auth", 404: "not_found", 413: "too_large"}.get(error.status_code, "invalid_request")
            return ApiError(error.status_code, str(error.detail), cause)
        case EngineDeadError():
            return ApiError(503, str(error), "engine", code="engine_dead")
        case EngineError():
            return ApiError(500, str(error), "engine", code="engine_error")
    logger.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "The server failed on this request; its log says more.", "internal", code="internal_error")


def openai_body(error: ApiError) -> ErrorReply:
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ErrorReply(error=ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code))


def anthropic_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def error_response(error: ApiError, path: str, request_id: str | None) -> Response:
    body = encode(anthropic_body(error, request_id) if is_anthropic(path) else openai_body(error))
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.allow:
        headers["Allow"] = ", ".join(error.allow)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, error.status, headers, media_type="application/json")
