"""What is counted, under vLLM's names with the prefix `kvasir:`, and how Prometheus is told.

What happens for every token only touches a Tally; it is added to the Prometheus objects once a second, and when
somebody asks. With several API processes the objects are files that whoever is asked adds up (Prometheus' multiprocess
mode). The engine's own figures are read from it when asked for, by whichever process is asked.
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

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each, which nobody reads

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


class Tally:
    """What every token touches: plain numbers."""

    def __init__(self) -> None:
        self.generated = 0
        self.gaps = [0] * (len(GAPS) + 1)  # between tokens, by bucket
        self.gap_seconds = 0.0

    def gap(self, seconds: float, count: int) -> None:
        """So many tokens came `seconds` after the one before them."""
        each = seconds / count
        self.gaps[bisect_left(GAPS, each)] += count
        self.gap_seconds += seconds


class Metrics:
    """All Prometheus objects of this process."""

    def __init__(self, model_name: str, max_model_len: int = 1 << 17) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.tally = Tally()
        self.num_live = 0  # requests inside this process
        tokens = _one_two_five(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Those that were found in the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = self._counter("request_success", "Requests that ended, by how.", ["finished_reason"])
        self.errors = self._counter("request_errors", "Requests that failed, by cause.", ["cause"])
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self.gap = self._histogram("inter_token_latency_seconds", "Between one token and the next.", GAPS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", GAPS
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to the first step it is in.", _LATENCY)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "That step to the first token.", _LATENCY)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self.inference_time = self._histogram("request_inference_time_seconds", "First step to last token.", _LATENCY)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens generated for one.", tokens)
        self.request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest completion of one.", tokens
        )
        self.request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of one that were not found in the cache.", tokens
        )
        self.params_n = self._histogram("request_params_n", "The parameter n.", _COUNTS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self.tokens_per_second = self._gauge("tokens_per_second", "Tokens generated in the last seconds.")
        self.live = self._gauge("api_requests_in_flight", "Requests inside the API processes.")
        self.startup = self._gauge("startup_seconds", "How long each phase of the start took.", ["phase"], "max")
        self.http = self._counter("http_requests", "HTTP requests.", ["method", "handler", "status"])
        self.http_seconds = self._histogram("http_request_duration_seconds", "Of HTTP requests.", _LATENCY, ["handler"])
        for cause in ("invalid_request", "auth", "rate_limit", "queue_full", "too_large", "timeout", "engine"):
            self.errors.labels(**self.labels, cause=cause)  # so that they are there, as 0, before the first error

    # ------------------------------------------------------------ making them

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
        """Add what was tallied."""
        tally, self.tally = self.tally, Tally()
        self.live.set(self.num_live)
        if tally.generated:
            self.generation_tokens.inc(tally.generated)
        if tally.gap_seconds:
            self.gap._sum.inc(tally.gap_seconds)
            for bucket, count in zip(self.gap._buckets, tally.gaps, strict=True):
                if count:
                    bucket.inc(count)

    def ended(self, times: RequestMetrics | None, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """One prompt's request ended as it should."""
        self.prompt_tokens.inc(num_prompt)
        self.prompt_tokens_cached.inc(num_cached)
        self.request_prompt.observe(num_prompt)
        self.request_generation.observe(num_generated)
        if times is None:
            return
        self.request_longest.observe(times.max_num_generation_tokens)
        if times.first_scheduled_time is not None:
            self.request_computed.observe(num_prompt - num_cached)
        if times.latency is not None:
            self.latency.observe(times.latency)
        if times.time_to_first_token is not None:
            self.first_token.observe(times.time_to_first_token)
        if times.time_in_queue is not None:
            self.queue_time.observe(times.time_in_queue)
        if times.first_token_time is not None and times.last_token_time is not None:
            if times.first_scheduled_time is not None:
                self.prefill_time.observe(times.first_token_time - times.first_scheduled_time)
                self.inference_time.observe(times.last_token_time - times.first_scheduled_time)
            decoding = times.last_token_time - times.first_token_time
            self.decode_time.observe(decoding)
            if num_generated > 1:
                self.per_token.observe(decoding / (num_generated - 1))

    def finished(self, reason: str) -> None:
        self.success.labels(**self.labels, finished_reason=reason).inc()

    def failed(self, cause: str) -> None:
        self.errors.labels(**self.labels, cause=cause).inc()

    def count_http(self, method: str, route: str, status: int, seconds: float) -> None:
        self.http.labels(**self.labels, method=method, handler=route, status=str(status)).inc()
        self.http_seconds.labels(**self.labels, handler=route).observe(seconds)

    # ------------------------------------------------------------ telling

    def collect(self) -> Iterable[Metric]:
        """Of all API processes together."""
        self.flush()
        if MULTIPROCESS not in os.environ:
            return list(self.registry.collect())
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return list(registry.collect())

    def page(self, further: Iterable[Metric], vllm_names: bool) -> bytes:
        """The text that Prometheus reads."""
        self.flush()
        registry = self.registry
        if MULTIPROCESS in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        text = generate_latest(registry) + generate_latest(_Fixed(list(further)))
        return text + text.replace(PREFIX.encode(), VLLM_PREFIX.encode()) if vllm_names else text


class _Fixed:
    """Stands for a registry that holds these."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`."""
    found: list[float] = []
    power = 1
    while power <= most:
        found += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return found or [1]
