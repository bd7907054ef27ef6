"""A snapshot of the engine as the JSON that the engine view and others read (docs/engine_view.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from kvasir.engine.transport import KEYS_PER_CLIENT
from kvasir.frontend.requests.metrics import PREFIX
from kvasir.messages import Int32Array, RequestSnapshot, Snapshot

# Names in the JSON, and the histograms they are read from.
LATENCIES = {"ttft": PREFIX + "time_to_first_token_seconds", "itl": PREFIX + "inter_token_latency_seconds"}

Run = tuple[int, int]  # first block, how many from there on


def engine_state(snapshot: Snapshot, model: str, latency: dict[str, Any]) -> dict[str, Any]:
    ends = np.cumsum(snapshot.num_held)
    tables = np.split(snapshot.held, ends[:-1]) if len(ends) else []
    running = [
        _request(picture, "running", runs(table)) for picture, table in zip(snapshot.running, tables, strict=True)
    ]
    return {
        "time": snapshot.time,
        "model": model,
        "blocks": {
            "total": snapshot.stats.num_blocks,
            "used": snapshot.stats.num_used_blocks,
            "cached": snapshot.stats.num_cached_blocks,
            "size": snapshot.block_size,
            "bytes": snapshot.block_bytes,
            "cached_runs": runs(np.sort(snapshot.cached)),
        },
        "requests": [*running, *(_request(picture, "waiting", []) for picture in snapshot.waiting)],
        "steps": [asdict(step) for step in snapshot.steps],
        "totals": asdict(snapshot.stats),
        "memory": asdict(snapshot.memory),
        "latency": latency,
    }


def _request(picture: RequestSnapshot, state: str, blocks: list[Run]) -> dict[str, Any]:
    return {
        "key": picture.key,
        "id": request_name(picture.key),
        "state": state,
        "prompt_tokens": picture.num_prompt,
        "computed_tokens": picture.num_computed,
        "output_tokens": picture.num_output,
        "max_tokens": picture.max_output,
        "cached_tokens": picture.num_cached,
        "preemptions": picture.num_preemptions,
        "age": picture.waited,
        "blocks": blocks,
    }


def request_name(key: int) -> str:
    """A short name. Ids that clients chose may be secret, and several of the engine's requests may be one client's."""
    client, number = divmod(key, 1 << KEYS_PER_CLIENT)
    return f"request {number}" if client == 0 else f"request {client}.{number}"


def runs(blocks: Int32Array) -> list[Run]:
    """Blocks in their order as stretches of neighbours: [4, 5, 6, 9] -> [(4, 3), (9, 1)]."""
    if not len(blocks):
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    counts = np.diff(starts, append=len(blocks))
    return list(zip(blocks[starts].tolist(), counts.tolist(), strict=True))


def distributions(metrics: Iterable[Metric]) -> dict[str, Any]:
    """The histograms of LATENCIES: upper bounds in seconds, and how many lie between each and the one before; the last
    count is of what exceeds them all."""
    found: dict[str, Any] = {name: {"bounds": [], "counts": []} for name in LATENCIES}
    for metric in metrics:
        for name, family in LATENCIES.items():
            if metric.name == family:
                found[name] = _distribution(metric)
    return found


def _distribution(metric: Metric) -> dict[str, Any]:
    below: dict[float, float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            below[bound] = below.get(bound, 0) + sample.value
    bounds = sorted(below)
    counts = np.diff([below[bound] for bound in bounds], prepend=0).astype(int).tolist()
    return {"bounds": [bound for bound in bounds if bound != float("inf")], "counts": counts}
