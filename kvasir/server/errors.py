"""Errors as clients get them: a status, OpenAI's error body or Anthropic's, and the cause it is counted under."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvasir.errors import MAX_ECHO, EngineDeadError, EngineError, OverloadedError, PromptTooLongError, RequestError
from kvasir.log import get_logger
from kvasir.lora.host import AdapterNotFoundError
from kvasir.server.schema.base import ErrorDetail, ErrorReply, MessagesErrorDetail, MessagesErrorReply, encode

logger = get_logger(__name__)


@dataclass(slots=True)
class ApiError(Exception):
    """An error with its HTTP status. `cause` is the label it is counted under."""

    status: int
    message: str
    cause: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    allow: tuple[str, ...] = ()  # methods that the path has
    counted: bool = False  # in the metrics

    def __post_init__(self) -> None:
        self.message = cut_echo(self.message)
        self.param = None if self.param is None else self.param[:MAX_ECHO]

    def __str__(self) -> str:
        return self.message


_MAX_MESSAGE = 1000  # characters; nothing that we say ourselves is longer
_LONG_VALUE = 40  # characters; nor do we use longer words
# A value in quotes, whose end may be cut off, or a word.
_VALUE = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*(?:'|$)|(?<!\w)"(?:[^"\\]|\\.)*(?:"|$)|\S+""", re.DOTALL)


def cut_echo(message: str) -> str:
    """An error's text without most of its long quoted values and words: they are what the client has sent."""
    if len(message) <= MAX_ECHO:
        return message
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}..."
    left = MAX_ECHO

    def cut(found: re.Match[str]) -> str:
        nonlocal left
        text = found.group()
        if len(text) <= _LONG_VALUE:
            return text
        kept = min(len(text), left)
        left -= kept
        return text if kept == len(text) else f"{text[:kept]}..."

    return _VALUE.sub(cut, message)


_FIELD_NAMES = {"extra_args": "vllm_xargs", "prompt_token_ids": "prompt"}  # bodies' names of the engine's parameters
# The interfaces' names of error types, by status.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OPENAI_TYPES |= {504: "timeout_error"}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
}


def unknown_model(name: str, served: list[str]) -> ApiError:
    message = f"The model {name!r} does not exist here. Available: {', '.join(served)}."
    return ApiError(404, message, "not_found", "model", "model_not_found")


def not_found(message: str) -> ApiError:
    return ApiError(404, message, "not_found")


def too_large(message: str, param: str | None = None) -> ApiError:
    return ApiError(413, message, "too_large", param, "too_large")


def timed_out(seconds: float | None, why: str = "") -> ApiError:
    """`why`: the engine's reason, if it gives one: it may end a request that cannot be done in time early."""
    after = "" if seconds is None else f" after {seconds:g} s"
    message = f"The request was ended: {why}." if why else f"The request ran out of time{after}."
    return ApiError(504, message, "timeout", "timeout", "timeout")


def as_api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Give an exception its status. Unexpected ones are a 500, with the traceback in the log.

    `names` are an interface's own names of the engine's parameters.
    """
    match error:
        case ApiError():
            return error
        case OverloadedError():
            return ApiError(429, str(error), "queue_full", code="queue_full", retry_after=error.retry_after)
        case AdapterNotFoundError():
            return ApiError(404, str(error), "not_found", error.parameter)
        case RequestError():
            name, message = error.parameter, str(error)
            if name is not None and (field := {**_FIELD_NAMES, **(names or {})}.get(name)) is not None:
                name, message = field, re.sub(rf"\b{name}\b", field, message)
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            return ApiError(400, message, "invalid_request", name, code)
        case RequestValidationError():
            found = complaint(error.errors())
            return ApiError(400, found.message, "invalid_request", found.param)
        case HTTPException():
            causes = {401: "auth", 404: "not_found", 413: "too_large", 503: "overloaded"}
            cause, wait = causes.get(error.status_code, "invalid_request"), (error.headers or {}).get("Retry-After")
            return ApiError(error.status_code, str(error.detail), cause, retry_after=float(wait) if wait else None)
        case EngineDeadError():
            return ApiError(503, str(error), "engine", code="engine_dead")
        case EngineError():
            return ApiError(500, str(error), "engine", code="engine_error")
    logger.error("a request failed inside the server", exc_info=error)
    return ApiError(
        500, "The server failed on this request; its log has the details.", "internal", code="internal_error"
    )


def openai_body(error: ApiError) -> ErrorReply:
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ErrorReply(error=ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code))


def anthropic_body(error: ApiError, request_id: str | None = None) -> MessagesErrorReply:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return MessagesErrorReply(error=MessagesErrorDetail(type=kind, message=error.message), request_id=request_id)


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


# ---------------------------------------------------------------- pydantic's errors as sentences

Error = dict[str, Any]  # as pydantic reports it

_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_SHORT = 40  # digits or characters
_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "none"}  # pydantic's names of a union's members


class Complaint(NamedTuple):
    message: str
    param: str | None


def complaint(errors: Sequence[Error]) -> Complaint:
    """One sentence about the first thing that is wrong with a body, and the field it is about."""
    first = errors[0]
    context = first.get("ctx") or {}
    if first["type"] == "invalid":  # raised by our own validators, with a whole sentence
        return Complaint(str(context["message"]), str(context["param"]))
    if first["type"] == "json_invalid":
        return Complaint(f"The body is not valid JSON: {context.get('error', first['msg'])}.", None)
    path = _path(first)
    if not path:
        return Complaint(_about_the_body(first.get("input")), None)
    # the entry that is wrong rather than "not a string" of a union whose list was meant
    path = max((found for error in errors if _is_in(found := _path(error), path)), key=len)
    same = [error for error in errors if _path(error) == path]
    return Complaint(f"{path} {_wrong(same)}", path.split(".")[0].split("[")[0])


def _path(error: Error) -> str:
    """The place of an error as messages[0].content, without the members of unions that pydantic adds."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("body", "path", "query") and part.isidentifier() and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path


def _is_in(place: str, path: str) -> bool:
    return place == path or place.startswith((f"{path}.", f"{path}["))


def _wrong(errors: Sequence[Error]) -> str:
    first = next((error for error in errors if error["type"] in ("too_long", "too_short")), errors[0])
    kind, context = first["type"], first.get("ctx") or {}
    if kind == "missing":
        return "is missing."
    if all(error["type"] in _KINDS for error in errors):
        kinds = list(dict.fromkeys(_KINDS[error["type"]] for error in errors))
        return f"must be {' or '.join(kinds)}, not {_shown(first.get('input'))}."
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, not {_shown(first.get('input'))}."
    if kind == "too_short":
        return f"must have at least {context['min_length']} {_entries(context['min_length'])}."
    if kind == "too_long":
        return f"must have at most {context['max_length']} {_entries(context['max_length'])}."
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters."
    if kind == "literal_error":
        return f"must be {context['expected']}, not {_shown(first.get('input'))}."
    return f"is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}."


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"


def _shown(value: object) -> str:
    """A short value as it is; of a long one only its type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str) and (isinstance(value, float) or _is_short(value)):
        return repr(value)
    return _JSON_NAMES.get(type(value), "this")


def _is_short(value: int | str) -> bool:
    return len(value) <= _SHORT if isinstance(value, str) else abs(value) < 10**_SHORT


def _about_the_body(body: object) -> str:
    if body is None:
        return "The request has no body, or null; it must be a JSON object."
    if isinstance(body, bytes):
        return "Send the body as JSON, with Content-Type: application/json."
    return f"The body must be a JSON object, not {_JSON_NAMES.get(type(body), 'this')}."


# ---------------------------------------------------------------- for the API's description

ERRORS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
    }
    for code, text in {
        400: "A parameter is wrong, unknown or not available; `param` names it.",
        401: "The API key is missing or wrong.",
        403: "The server was not started with what allows it.",
        404: "The model or object does not exist.",
        409: "The server cannot do it in its present state: try again later.",
        413: "The body or the prompt is too long.",
        415: "The body has a Content-Encoding.",
        429: "The queue is full, or the key's limit is reached: see Retry-After.",
        500: "The request failed inside the server.",
        503: "The engine is starting or draining, or has died.",
        504: "The request ran out of time.",
    }.items()
}


EVENTS = "text/event-stream"


def answers(
    *kinds: type[Any], description: str = "The answer.", stream: str | None = None, errors: str = "ErrorReply"
) -> dict[int | str, dict[str, Any]]:
    """The replies of a route, for the documentation.

    `kinds`: what the answer may be. `stream`: the media type of a streamed answer. `errors`: the body of errors.
    """
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    content: dict[str, Any] = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    if stream is not None:
        content[stream] = {"schema": {}}
    failed = {
        code: {**reply, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{errors}"}}}}
        for code, reply in ERRORS.items()
    }
    return {200: {"description": description, "content": content}, **failed}
