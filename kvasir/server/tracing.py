"""OpenTelemetry: a span for each request, with --otlp-traces-endpoint and the extra `otel`. API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir import __version__
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest


class Tracer:
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

    def report(self, request: ApiRequest, now: float, fields: dict[str, Any]) -> None:
        """Send the span of a request that has ended; `fields` are those of its log line."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        call = request.call
        parent = None
        if call.traceparent:
            parent = TraceContextTextMapPropagator().extract({"traceparent": call.traceparent})
        span = self._tracer.start_span(call.path, parent, SpanKind.SERVER, start_time=int(call.arrived * 1e9))
        attributes = _attributes(request, now, fields)
        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if fields["error"] is not None:
            span.set_status(Status(StatusCode.ERROR, fields["error"]))
        span.end(int(now * 1e9))

    def close(self) -> None:
        self._provider.shutdown()


def _attributes(request: ApiRequest, now: float, fields: dict[str, Any]) -> dict[str, Any]:
    """Attributes under the names of OpenTelemetry's conventions for language models."""
    return {
        "gen_ai.request.model": request.state.model_names[0],
        "gen_ai.request.id": request.call.id,
        "gen_ai.request.max_tokens": request.params.max_tokens,
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.top_p": request.params.top_p,
        "gen_ai.request.n": request.params.n,
        "gen_ai.usage.prompt_tokens": request.tokens.num_prompt,
        "gen_ai.usage.completion_tokens": fields["completion_tokens"],
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.latency.e2e": now - request.call.arrived,
        "gen_ai.response.finish_reasons": fields["finish_reason"],
    }
