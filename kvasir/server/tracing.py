"""OpenTelemetry: a span for each request, if --otlp-traces-endpoint is set and the extra `otel` is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvasir import __version__
from kvasir.errors import ConfigError


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
