"""The two log lines of each request, and its OpenTelemetry span (--otlp-traces-endpoint, with the extra `otel`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvasir import __version__
from kvasir.errors import ConfigError
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
    _trace(request, now, fields)


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


# ---------------------------------------------------------------- tracing


def _trace(request: ApiRequest, now: float, fields: dict[str, Any]) -> None:
    """Report a span, with the names of OpenTelemetry's conventions for language models."""
    call, params = request.call, request.params
    attributes = {
        "gen_ai.request.model": request.state.model_names[0],
        "gen_ai.request.id": call.id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.prompt_tokens": request.tokens.num_prompt,
        "gen_ai.usage.completion_tokens": request.tokens.num_generated,
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.latency.e2e": now - call.arrived,
        "gen_ai.response.finish_reasons": fields["finish_reason"],
    }
    request.state.tracer.request(call.path, call.traceparent, call.arrived, now, attributes, fields["error"])


class Tracer(Protocol):
    def request(
        self,
        name: str,
        traceparent: str | None,
        began: float,
        ended: float,
        attributes: Mapping[str, Any],
        error: str | None,
    ) -> None:
        """Report a request that has ended. Times are of `time.time`."""

    def close(self) -> None: ...


class _NoTracer:
    def request(self, *args: Any, **kwargs: Any) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACER: Tracer = _NoTracer()


class OtlpTracer:
    """Sends spans in the background, in batches."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            message = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'kvasir-llm[otel]'"
            raise ConfigError(f"{message} ({error}).") from error
        resource = Resource.create({"service.name": "kvasir", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("kvasir")

    def request(
        self,
        name: str,
        traceparent: str | None,
        began: float,
        ended: float,
        attributes: Mapping[str, Any],
        error: str | None,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=int(began * 1e9))
        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(ended * 1e9))

    def close(self) -> None:
        self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer:
    return NO_TRACER if endpoint is None else OtlpTracer(endpoint)
