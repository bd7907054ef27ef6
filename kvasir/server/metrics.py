"""Prometheus metrics of the API process, under vLLM's names with the prefix `kvasir:`.

Every token only touches a Tally of plain numbers; the lifecycle adds it to the Prometheus objects once a second, and
/metrics when it is read. Several API processes write files that the process that is asked adds up (Prometheus'
multiprocess mode). The engine's own figures are read from it on demand (engine_metrics.py).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from kvasir.frontend.requests.metrics import PREFIX
from kvasir.outputs import RequestMetrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each metric that no dashboard uses

VLLM_PREFIX = "vllm:"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_COUNTS = (1, 2, 5, 10, 20)
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Tally:
    """Plain numbers that every token updates."""

    def __init__(self) -> None:
        self.gaps = [0] * (len(GAPS) + 1)  # tokens by the bucket of their inter-token latency
        self.gap_seconds = 0.0

    def gap(self, seconds: float, count: int) -> None:
        """Count `count` tokens that came `seconds` after the previous output."""
        each = seconds / count
        self.gaps[bisect_left(GAPS, each)] += count
        self.gap_seconds += seconds


class Metrics:
    """All Prometheus objects of this process."""

    def __init__(self, model_name: str, max_model_len: int = 1 << 17) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.tally = Tally()
        self.num_live = 0  # requests in flight in this process
        tokens = _one_two_five(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens of finished requests that were found in the prefix cache."
        )
        self.prompt_tokens_by_source = self._counter(
            "prompt_tokens_by_source",
            "Prompt tokens of finished requests by where their KV came from: local_compute, local_cache_hit (device "
            "or host memory), or external_kv_transfer, which does not happen.",
            ["source"],
        )
        self._by_source = {
            source: self.prompt_tokens_by_source.labels(**self.labels, source=source) for source in _SOURCES
        }
        self.success = self._counter("request_success", "Finished requests by finish reason.", ["finished_reason"])
        self.errors = self._counter("request_errors", "Failed requests by cause.", ["cause"])
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.gap = self._histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.", GAPS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token of a request, without the first.", GAPS
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _LATENCY
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Seconds from a request's arrival to its first step.", _LATENCY
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Seconds from a request's first step to its first token.", _LATENCY
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Seconds from a request's first token to its last.", _LATENCY
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "Seconds from a request's first step to its last token.", _LATENCY
        )
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens per request.", tokens)
        self.request_generation = self._histogram("request_generation_tokens", "Generated tokens per request.", tokens)
        self.request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest completion.", tokens
        )
        self.request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens per request that were not in the prefix cache.", tokens
        )
        self.params_n = self._histogram("request_params_n", "The parameter n of requests.", _COUNTS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens of requests.", tokens
        )
        self.tokens_per_second = self._gauge(
            "tokens_per_second",
            "Generated tokens per second, of all engines together, over the last few seconds.",
            mode="livemax",  # every API process finds the same
        )
        self.live = self._gauge("api_requests_in_flight", "Requests in flight in the API processes.")
        self.startup = self._gauge("startup_seconds", "Seconds that each phase of the start took.", ["phase"], "max")
        self.http = self._counter(
            "http_requests", "HTTP requests by method, route and status.", ["method", "handler", "status"]
        )
        self.http_seconds = self._histogram(
            "http_request_duration_seconds", "Seconds that HTTP requests took.", _LATENCY, ["handler"]
        )
        for cause in ("invalid_request", "auth", "rate_limit", "queue_full", "too_large", "timeout", "engine"):
            self.errors.labels(**self.labels, cause=cause)  # exported as 0 before the first error

    # ------------------------------------------------------------ making metrics

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Any:
        return self._labelled(Counter(PREFIX + name, help, [*self.labels, *labels], registry=self.registry), labels)

    def _histogram(self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Any:
        every = [*self.labels, *labels]
        return self._labelled(Histogram(PREFIX + name, help, every, buckets=buckets, registry=self.registry), labels)

    def _gauge(self, name: str, help: str, labels: Sequence[str] = (), mode: str = "livesum") -> Any:
        every = [*self.labels, *labels]
        made = Gauge(PREFIX + name, help, every, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]
        return self._labelled(made, labels)

    def _labelled(self, made: Any, labels: Sequence[str]) -> Any:
        return made if labels else made.labels(**self.labels)

    # ------------------------------------------------------------ counting

    def flush(self) -> None:
        """Add the tally to the Prometheus objects and start a new one."""
        tally, self.tally = self.tally, Tally()
        self.live.set(self.num_live)
        if tally.gap_seconds:
            self.gap._sum.inc(tally.gap_seconds)
            for bucket, count in zip(self.gap._buckets, tally.gaps, strict=True):
                if count:
                    bucket.inc(count)

    def ended(self, times: RequestMetrics | None, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Observe a request of the engine that has finished."""
        self._read(times, num_prompt, num_cached)
        self.request_generation.observe(num_generated)
        if times is None:
            return
        self.request_longest.observe(times.max_num_generation_tokens)
        if times.time_to_first_token is not None:
            self.first_token.observe(times.time_to_first_token)
        if times.first_token_time is not None and times.last_token_time is not None:
            if times.first_scheduled_time is not None:
                self.prefill_time.observe(times.first_token_time - times.first_scheduled_time)
                self.inference_time.observe(times.last_token_time - times.first_scheduled_time)
            decoding = times.last_token_time - times.first_token_time
            self.decode_time.observe(decoding)
            if num_generated > 1:
                self.per_token.observe(decoding / (num_generated - 1))

    def pooled(self, times: RequestMetrics | None, num_prompt: int, num_cached: int) -> None:
        """Observe a request to a pooling model that has finished: it generates nothing, all of it is one prefill."""
        self._read(times, num_prompt, num_cached)
        if times is not None and times.first_scheduled_time is not None and times.finished_time is not None:
            self.prefill_time.observe(times.finished_time - times.first_scheduled_time)
            self.inference_time.observe(times.finished_time - times.first_scheduled_time)

    def _read(self, times: RequestMetrics | None, num_prompt: int, num_cached: int) -> None:
        self.prompt_tokens.inc(num_prompt)
        self.prompt_tokens_cached.inc(num_cached)
        self._by_source["local_compute"].inc(num_prompt - num_cached)
        self._by_source["local_cache_hit"].inc(num_cached)
        self.request_prompt.observe(num_prompt)
        if times is not None and times.first_scheduled_time is not None:
            self.request_computed.observe(num_prompt - num_cached)
            self.queue_time.observe(times.first_scheduled_time - times.arrival_time)
        if times is not None and times.latency is not None:
            self.latency.observe(times.latency)

    def finished(self, reason: str) -> None:
        self.success.labels(**self.labels, finished_reason=reason).inc()

    def failed(self, cause: str) -> None:
        self.errors.labels(**self.labels, cause=cause).inc()

    def count_http(self, method: str, route: str, status: int, seconds: float) -> None:
        self.http.labels(**self.labels, method=method, handler=route, status=str(status)).inc()
        self.http_seconds.labels(**self.labels, handler=route).observe(seconds)

    # ------------------------------------------------------------ reading

    def collect(self) -> Iterable[Metric]:
        """The metrics of all API processes together."""
        self.flush()
        if MULTIPROCESS not in os.environ:
            return list(self.registry.collect())
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return list(registry.collect())

    def page(self, further: Iterable[Metric], vllm_names: bool) -> bytes:
        """The page that Prometheus reads; `further` metrics are added to our own."""
        self.flush()
        registry = self.registry
        if MULTIPROCESS in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        text = generate_latest(registry) + generate_latest(_Fixed(list(further)))
        return text + text.replace(PREFIX.encode(), VLLM_PREFIX.encode()) if vllm_names else text


class _Fixed:
    """Looks like a registry to Prometheus' writer."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


def _one_two_five(most: int) -> list[float]:
    """Buckets 1, 2, 5, 10, ... up to `most`."""
    found: list[float] = []
    power = 1
    while power <= most:
        found += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return found or [1]
