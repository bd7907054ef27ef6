"""The engine's metrics as callers read them: vLLM's names under our prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from kvasir.messages import STEP_SIZES, EngineStats

PREFIX = "kvasir:"


@dataclass(slots=True, frozen=True)
class Metric:
    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class Gauge(Metric):
    """A value that goes up and down."""


class Counter(Metric):
    """A value that only grows."""


@dataclass(slots=True, frozen=True)
class Histogram(Metric):
    """A distribution of values; `value` is their sum."""

    buckets: dict[str, int] = field(default_factory=dict)  # cumulative counts by upper bound; "+Inf": all

    @property
    def sum(self) -> float:
        return self.value

    @property
    def count(self) -> int:
        return self.buckets["+Inf"]


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Add up the figures of several engines."""
    return EngineStats(**{f.name: _sum([getattr(each, f.name) for each in stats]) for f in fields(EngineStats)})


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, or of lists element by element."""
    return [sum(place) for place in zip(*values, strict=True)] if isinstance(values[0], list) else sum(values)


def read_metrics(stats: EngineStats, frontend: dict[str, float]) -> list[Metric]:
    """Metrics of an engine; `frontend` are the API process's own counters by name."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_prompt_tokens_waiting": stats.num_waiting_tokens,
        "kv_cache_usage_perc": stats.num_used_blocks / stats.num_blocks,
        "kv_cache_blocks": stats.num_blocks,
        "kv_cache_blocks_used": stats.num_used_blocks,
        "kv_cache_blocks_cached": stats.num_cached_blocks,
        "host_cache_blocks": stats.host_blocks,
        "host_cache_blocks_used": stats.host_used_blocks,
        "host_cache_blocks_cached": stats.host_cached_blocks,
        "cuda_graphs": stats.num_graphs,
        "cuda_graph_memory_bytes": stats.graph_bytes,
    }
    counters = {
        "engine_steps": stats.steps,
        "iteration_tokens": stats.scheduled_tokens,
        "num_preemptions": stats.preemptions,
        "partial_prefills": stats.partial_prefills,
        "requests_refused": stats.refused_requests,
        "admissions_held_back": stats.held_back,
        "timeouts_waiting": stats.timeouts_waiting,
        "timeouts_running": stats.timeouts_running,
        "timeouts_foreseen": stats.timeouts_foreseen,
        "dropped_tokens": stats.dropped_tokens,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "kv_block_evictions": stats.evictions,
        "kv_block_copies": stats.copied_blocks,
        "kv_block_shares": stats.shared_blocks,
        "kv_blocks_freed_by_window": stats.freed_blocks,
        "num_preemptions_swapped": stats.swapped_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "kv_blocks_swapped_out": stats.swapped_out_blocks,
        "kv_blocks_swapped_in": stats.swapped_in_blocks,
        "kv_blocks_offloaded": stats.offloaded_blocks,
        "kv_blocks_restored": stats.restored_blocks,
        "host_cache_evictions": stats.host_evictions,
        "host_cache_hits": stats.host_cache_hits,
        "cuda_graphs_deferred": stats.graphs_deferred,
        "cuda_graphs_dropped": stats.graphs_dropped,
        **frontend,
    }
    metrics: list[Metric] = [Gauge(PREFIX + name, value) for name, value in gauges.items()]
    metrics += [Counter(PREFIX + name, value) for name, value in counters.items()]
    return [*metrics, step_histogram(stats)]


def step_histogram(stats: EngineStats) -> Histogram:
    """Tokens per step, under vLLM's name, although it ends like a counter's."""
    bounds = [*(f"{size}.0" for size in STEP_SIZES), "+Inf"]
    buckets = dict(zip(bounds, accumulate(stats.step_sizes), strict=True))
    return Histogram(f"{PREFIX}iteration_tokens_total", stats.scheduled_tokens, {}, buckets)
