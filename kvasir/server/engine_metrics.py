"""Prometheus metrics that are read on demand: the engines' figures, the device's, and settings as labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvasir.frontend.requests import metrics
from kvasir.frontend.requests.metrics import PREFIX
from kvasir.messages import EngineStats
from kvasir.server.device import DeviceUse

# Help texts of the metrics that `metrics.read_metrics` returns.
HELP = {
    "num_requests_running": "Requests that are running.",
    "num_requests_waiting": "Requests in the queue.",
    "num_prompt_tokens_waiting": "Prompt tokens of requests in the queue.",
    "kv_cache_usage_perc": "Share of KV blocks in use; 1 means all.",
    "kv_cache_blocks": "KV blocks in total.",
    "kv_cache_blocks_used": "KV blocks held by requests.",
    "kv_cache_blocks_cached": "KV blocks in the prefix cache.",
    "host_cache_blocks": "KV blocks in host memory in total.",
    "host_cache_blocks_used": "Host blocks held for preempted requests.",
    "host_cache_blocks_cached": "Host blocks in the prefix cache.",
    "cuda_graphs": "Captured CUDA graphs.",
    "cuda_graph_memory_bytes": "Device memory held by CUDA graphs.",
    "engine_steps": "Steps of the engine.",
    "iteration_tokens_total": "Tokens per step.",
    "num_preemptions": "Preemptions of requests.",
    "partial_prefills": "Times that a step prefilled only a part of a prompt.",
    "requests_refused": "Requests refused because the queue was full.",
    "admissions_held_back": "Steps in which the watermark kept a request in the queue.",
    "timeouts_waiting": "Requests that timed out in the queue.",
    "timeouts_running": "Requests that timed out while running.",
    "timeouts_foreseen": "Timed-out requests that were ended early because they could not meet their deadline.",
    "dropped_tokens": "Tokens sampled for requests that had already ended.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "kv_block_evictions": "Cached KV blocks evicted from the prefix cache.",
    "kv_block_copies": "Shared KV blocks copied before a write.",
    "kv_block_shares": "KV blocks shared by the completions of a request.",
    "kv_blocks_freed_by_window": "KV blocks freed because they left every layer's sliding window.",
    "num_preemptions_swapped": "Preemptions that swapped KV blocks to host memory.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "kv_blocks_swapped_out": "KV blocks of preempted requests swapped to host memory.",
    "kv_blocks_swapped_in": "KV blocks of preempted requests swapped back from host memory.",
    "kv_blocks_offloaded": "Evicted KV blocks copied to host memory.",
    "kv_blocks_restored": "Evicted KV blocks copied back from host memory.",
    "host_cache_evictions": "Cached host blocks evicted.",
    "host_cache_hits": "Prompt tokens found in host memory.",
    "cuda_graphs_deferred": "Captures of CUDA graphs deferred for lack of memory; their steps ran eagerly.",
    "cuda_graphs_dropped": "CUDA graphs dropped to make room for others.",
    "queue_size": "Requests in the queue, under the name that autoscalers use.",
}

_REPLACED_BY_HISTOGRAM = f"{PREFIX}iteration_tokens"  # its total is the histogram's sum, and the names would clash


def engine_metrics(stats: Sequence[EngineStats], model_name: str) -> list[Metric]:
    """Metrics of all engines, labelled with each engine's number."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}
    for engine, each in enumerate(stats):
        for metric in [*metrics.read_metrics(each, {}), metrics.Gauge(f"{PREFIX}queue_size", each.num_waiting)]:
            if metric.name == _REPLACED_BY_HISTOGRAM:
                continue
            family = found.get(metric.name)
            if family is None:
                words = HELP[metric.name.removeprefix(PREFIX)]
                family = found[metric.name] = _kind(metric)(metric.name, words, labels=["model_name", "engine"])
            labels = [model_name, str(engine)]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(metric, metrics.Histogram)
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            else:
                family.add_metric(labels, metric.value)
    return list(found.values())


def _kind(metric: metrics.Metric) -> type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
    if isinstance(metric, metrics.Histogram):
        return HistogramMetricFamily
    return GaugeMetricFamily if isinstance(metric, metrics.Gauge) else CounterMetricFamily


def device_metrics(devices: Iterable[DeviceUse], model_name: str) -> list[Metric]:
    labels = ["model_name", "device"]
    busy = GaugeMetricFamily(
        f"{PREFIX}device_utilization", "Share of time in which the device is busy; 1 means always.", labels=labels
    )
    used = GaugeMetricFamily(f"{PREFIX}device_memory_used_bytes", "Device memory in use.", labels=labels)
    total = GaugeMetricFamily(f"{PREFIX}device_memory_total_bytes", "Device memory in total.", labels=labels)
    for each in devices:
        busy.add_metric([model_name, each.name], each.utilization)
        used.add_metric([model_name, each.name], each.memory_used)
        total.add_metric([model_name, each.name], each.memory_total)
    return [busy, used, total]


def info_metric(name: str, help: str, labels: dict[str, str]) -> Metric:
    """A metric of value 1 whose labels are settings."""
    found = GaugeMetricFamily(PREFIX + name, help, labels=list(labels))
    found.add_metric(list(labels.values()), 1)
    return found
