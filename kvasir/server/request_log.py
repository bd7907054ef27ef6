"""The two lines that the log has of each request, and its span in a trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvasir import __version__
from kvasir.errors import ConfigError
from kvasir.log import get_logger
from kvasir.server.errors import ApiError

if TYPE_CHECKING:
    from kvasir.server.api_request import Run

logger = get_logger("kvasir.server.requests")
MOST_OF_USER = 128  # characters


def arrived(run: Run) -> None:
    metrics, params, call = run.state.metrics, run.params, run.call
    metrics.params_n.observe(params.n)
    if params.max_tokens is not None:
        metrics.params_max_tokens.observe(min(params.max_tokens, run.engine.config.model.max_model_len))
    facts = {
        "request_id": call.id,
        "path": call.path,
        "key": call.log_name,
        "prompt_tokens": run.num_prompt_tokens,
        "user": run.terms.user,
    }
    logger.info(
        "%s arrived: %s, %d prompt tokens, key %s%s",
        *(call.id, call.path, run.num_prompt_tokens, _who(run), _request_text(run)),
        extra={"fields": facts},
    )


def _who(run: Run) -> str:
    """The key, and the user that its client names: a text from outside, so it is quoted, and cut."""
    user = run.terms.user
    return run.call.log_name if user is None else f"{run.call.log_name}, user {user[:MOST_OF_USER]!r}"


def _request_text(run: Run) -> str:
    config = run.state.config
    if not config.enable_log_requests:
        return ""
    prompts = [prompt.get("prompt") or prompt["prompt_token_ids"] for prompt in run.prompts]
    return f" {run.params}, prompts: {str(prompts)[: config.max_log_len]}"


def ended(run: Run, error: ApiError | None) -> None:
    now = time.time()
    facts = _facts(run, error, now - run.call.arrived)
    logger.info(
        "%s ended: %s, %d tokens in, %d out, %.3f s, first token after %s s, %s s per token, key %s%s",
        *(run.call.id, facts["finish_reason"], run.num_prompt_tokens, run.num_generated, facts["seconds"]),
        *(facts["time_to_first_token"] or "-", facts["time_per_token"] or "-", _who(run)),
        "" if error is None else f": {error.message}",
        extra={"fields": facts},
    )
    _trace(run, now, facts)


def _facts(run: Run, error: ApiError | None, took: float) -> dict[str, Any]:
    first, per_token = run.first_token, None
    if first is not None and run.num_generated > 1:
        per_token = round((took - first) / (run.num_generated - 1), 5)
    return {
        "request_id": run.call.id,
        "path": run.call.path,
        "key": run.call.log_name,
        "user": run.terms.user,
        "finish_reason": ",".join(sorted(set(run.reasons))) if error is None else error.cause,
        "prompt_tokens": run.num_prompt_tokens,
        "cached_tokens": run.num_cached,
        "completion_tokens": run.num_generated,
        "seconds": round(took, 4),
        "time_to_first_token": None if first is None else round(first, 4),
        "time_per_token": per_token,
        "error": None if error is None else error.message,
    }


def _trace(run: Run, now: float, facts: dict[str, Any]) -> None:
    """By the names of OpenTelemetry's conventions for language models."""
    attributes = {
        "gen_ai.request.model": run.state.model_names[0],
        "gen_ai.request.id": run.call.id,
        "gen_ai.request.max_tokens": run.params.max_tokens,
        "gen_ai.request.temperature": run.params.temperature,
        "gen_ai.request.top_p": run.params.top_p,
        "gen_ai.request.n": run.params.n,
        "gen_ai.usage.prompt_tokens": run.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": run.num_generated,
        "gen_ai.latency.time_to_first_token": run.first_token,
        "gen_ai.latency.e2e": now - run.call.arrived,
        "gen_ai.response.finish_reasons": facts["finish_reason"],
    }
    run.state.tracer.request(run.call.path, run.call.traceparent, run.call.arrived, now, attributes, facts["error"])


# ----------------------------------------------------------------
# OpenTelemetry: a span for each request, if --otlp-traces-endpoint is set and the extra `otel` is installed.


class Tracer(Protocol):
    def request(
        self,
        name: str,
        traceparent: str | None,
        began: float,
        ended: float,
        facts: Mapping[str, Any],
        error: str | None,
    ) -> None:
        """A request has ended. Times are of `time.time`."""

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
        facts: Mapping[str, Any],
        error: str | None,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=int(began * 1e9))
        span.set_attributes({key: value for key, value in facts.items() if value is not None})
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(ended * 1e9))

    def close(self) -> None:
        self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer:
    return NO_TRACER if endpoint is None else OtlpTracer(endpoint)
