"""The engine's metrics as callers read them: vLLM's names under our prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from typing import Any

from kvasir.engine.stats import ALIKE, STEP_SIZES, EngineStats
from kvasir.messages import BLOCK_AGES

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
    found = {f: [getattr(each, f.name) for each in stats] for f in fields(EngineStats)}
    return EngineStats(**{f.name: values[0] if f.metadata == ALIKE else _sum(values) for f, values in found.items()})


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, or of lists and mappings element by element."""
    if isinstance(values[0], dict):
        keys = {key: None for value in values for key in value}
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if not isinstance(values[0], list):
        return sum(values)
    return [sum(place) for place in zip_longest(*values, fillvalue=0)]


def read_metrics(stats: EngineStats, frontend: dict[str, float]) -> list[Metric]:
    """Metrics of an engine; `frontend` are the API process's own counters by name."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_prompt_tokens_waiting": stats.num_waiting_tokens,
        "kv_cache_usage_perc": stats.num_used_blocks / max(1, stats.num_blocks),
        "kv_cache_blocks": stats.num_blocks,
        "kv_cache_blocks_used": stats.num_used_blocks,
        "kv_cache_blocks_cached": stats.num_cached_blocks,
        "host_cache_blocks": stats.host_blocks,
        "host_cache_blocks_used": stats.host_used_blocks,
        "host_cache_blocks_cached": stats.host_cached_blocks,
        "adapter_slots": stats.resource_slots,
        "adapter_slots_used": stats.resource_slots_used,
        "cuda_graphs": stats.num_graphs,
        "cuda_graph_memory_bytes": stats.graph_bytes,
    }
    counters = {
        "engine_steps": stats.steps,
        "iteration_tokens": stats.scheduled_tokens,
        "generation_tokens": stats.generated_tokens,
        "num_preemptions": stats.preemptions,
        "partial_prefills": stats.partial_prefills,
        "requests_refused": stats.refused_requests,
        "admissions_held_back": stats.held_back,
        "timeouts_waiting": stats.timeouts_waiting,
        "timeouts_running": stats.timeouts_running,
        "timeouts_foreseen": stats.timeouts_foreseen,
        "dropped_tokens": stats.dropped_tokens,
        "adapter_loads": stats.resource_loads,
        "adapter_evictions": stats.resource_evictions,
        "adapter_hits": stats.resource_hits,
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
        "guided_tokens": stats.guided_tokens,
        "guided_passes": stats.guided_passes,
        "guided_steps": stats.guided_steps,
        "guided_lenient": stats.lenient_guides,
        "guided_jumps": stats.jumps,
        "guided_tokens_jumped": stats.jumped_tokens,
        "guided_mask_seconds": stats.mask_seconds,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": stats.draft_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "spec_decode_rows_without_drafts": stats.rows_without_drafts,
        "spec_decode_rows_paused": stats.rows_paused,
        "late_compilations": stats.late_compilations,
        "late_captures": stats.late_captures,
        **frontend,
    }
    metrics: list[Metric] = [Gauge(PREFIX + name, value) for name, value in gauges.items()]
    metrics += [Counter(PREFIX + name, value) for name, value in counters.items()]
    metrics += [_accepted_at(*each) for each in enumerate(stats.accepted_by_position)]
    metrics += [
        Counter(f"{PREFIX}expert_tokens", number, {"layer": str(layer), "experts": experts})
        for layer, row in stats.expert_tokens.items()
        for experts, number in row.items()
    ]
    metrics += [_waiting("capacity", stats.num_waiting), _waiting("deferred", 0)]
    metrics += [_sleep_state(state, state == "awake") for state in ("awake", "weights_offloaded", "discard_all")]
    return [*metrics, *_histograms(stats)]


def _accepted_at(position: int, number: int) -> Counter:
    return Counter(f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", number, {"position": str(position)})


def _waiting(reason: str, number: int) -> Gauge:
    """Waiting requests as vLLM divides them. Every request here waits for rows, tokens or blocks: none is deferred."""
    return Gauge(f"{PREFIX}num_requests_waiting_by_reason", number, {"reason": reason})


def _sleep_state(name: str, is_in_it: bool) -> Gauge:
    """One of vLLM's states. This engine has no sleep mode, so it is always awake."""
    return Gauge(f"{PREFIX}engine_sleep_state", float(is_in_it), {"sleep_state": name})


def step_histogram(stats: EngineStats) -> Histogram:
    """Tokens per step, under vLLM's name, although it ends like a counter's."""
    return _histogram("iteration_tokens_total", STEP_SIZES, stats.step_sizes, stats.step_tokens)


def _histograms(stats: EngineStats) -> list[Histogram]:
    made = [step_histogram(stats)]
    for name, counts, seconds in (
        ("kv_block_lifetime_seconds", stats.block_lifetimes, stats.block_lifetime_seconds),
        ("kv_block_idle_before_evict_seconds", stats.block_idle_times, stats.block_idle_seconds),
        ("kv_block_reuse_gap_seconds", stats.block_reuse_gaps, stats.block_reuse_seconds),
    ):
        made.append(_histogram(name, BLOCK_AGES, counts, seconds))
    return made


def _histogram(name: str, bounds: Sequence[float], counts: list[int], total: float) -> Histogram:
    upper = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return Histogram(PREFIX + name, total, {}, dict(zip(upper, accumulate(counts), strict=True)))
