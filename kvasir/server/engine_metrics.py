"""Figures that are read when Prometheus asks: the engines' own, the device's, facts as labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvasir.frontend.requests import metrics
from kvasir.frontend.requests.metrics import PREFIX
from kvasir.messages import EngineStats
from kvasir.server.device import DeviceUse

# What `metrics.read_metrics` names, in words.
HELP = {
    "num_requests_running": "Requests that have a row.",
    "num_requests_waiting": "Requests that wait for one.",
    "num_prompt_tokens_waiting": "Prompt tokens of requests that wait.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 1 is all.",
    "kv_cache_blocks": "KV blocks there are.",
    "kv_cache_blocks_used": "KV blocks that requests hold.",
    "kv_cache_blocks_cached": "KV blocks whose content can be found again.",
    "host_cache_blocks": "Blocks of host memory.",
    "host_cache_blocks_used": "Held for preempted requests.",
    "host_cache_blocks_cached": "Whose content can be found again.",
    "cuda_graphs": "CUDA graphs captured.",
    "cuda_graph_memory_bytes": "Memory of the device that they keep.",
    "engine_steps": "Steps of the engine.",
    "iteration_tokens_total": "Tokens computed in a step.",
    "num_preemptions": "Times a request lost its row.",
    "partial_prefills": "Steps that computed part of a prompt.",
    "requests_refused": "Because the queue was full.",
    "admissions_held_back": "Steps in which the watermark kept a request waiting.",
    "timeouts_waiting": "Requests whose time ran out while they waited.",
    "timeouts_running": "Requests whose time ran out while they ran.",
    "timeouts_foreseen": "Of those, ended early because they could not be done in time.",
    "dropped_tokens": "Tokens sampled for requests that had ended.",
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "kv_block_evictions": "Cached blocks given to others.",
    "kv_block_copies": "Shared blocks copied before a write.",
    "kv_block_shares": "Blocks shared by forks.",
    "kv_blocks_freed_by_window": "Blocks that no layer sees any more.",
    "num_preemptions_swapped": "Preemptions whose blocks were kept in host memory.",
    "recomputed_tokens": "Computed before a preemption and again after it.",
    "kv_blocks_swapped_out": "Blocks of preempted requests, to host memory.",
    "kv_blocks_swapped_in": "And back.",
    "kv_blocks_offloaded": "Evicted blocks copied to host memory.",
    "kv_blocks_restored": "And back.",
    "host_cache_evictions": "Cached blocks given to others there.",
    "host_cache_hits": "Prompt tokens found there.",
    "cuda_graphs_deferred": "Times there was no memory to capture one, so that steps ran without.",
    "cuda_graphs_dropped": "Graphs not used for long that made way for others.",
    "queue_size": "Requests that wait, by the name that scaling rules ask for.",
}

_IN_THE_HISTOGRAM = f"{PREFIX}iteration_tokens"  # as a counter it would have the histogram's name; its sum is the same


def engine_metrics(stats: Sequence[EngineStats], model_name: str) -> list[Metric]:
    """Each with the number of its engine."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}
    for engine, each in enumerate(stats):
        for metric in [*metrics.read_metrics(each, {}), metrics.Gauge(f"{PREFIX}queue_size", each.num_waiting)]:
            if metric.name == _IN_THE_HISTOGRAM:
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
        f"{PREFIX}device_utilization", "Share of time the device is busy; 1: always.", labels=labels
    )
    used = GaugeMetricFamily(f"{PREFIX}device_memory_used_bytes", "Memory of the device in use.", labels=labels)
    total = GaugeMetricFamily(f"{PREFIX}device_memory_total_bytes", "Memory of the device.", labels=labels)
    for each in devices:
        busy.add_metric([model_name, each.name], each.utilization)
        used.add_metric([model_name, each.name], each.memory_used)
        total.add_metric([model_name, each.name], each.memory_total)
    return [busy, used, total]


def info_metric(name: str, help: str, labels: dict[str, str]) -> Metric:
    """Facts as labels, with the value 1."""
    found = GaugeMetricFamily(PREFIX + name, help, labels=list(labels))
    found.add_metric(list(labels.values()), 1)
    return found
