"""Write docs/metrics.md from the metrics themselves. A test compares the page with what this makes.

usage: metrics_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from prometheus_client.core import Metric

from kvasir.engine.stats import EngineStats
from kvasir.executor.fake import fake_config
from kvasir.server.engine_metrics import cache_metric, device_metrics, engine_metrics
from kvasir.server.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

<!-- Generated from kvasir/server by `make docs`. -->

`GET /metrics` speaks Prometheus. Names are vLLM's with the prefix `kvasir:`; `--vllm-metric-names` exports each with
`vllm:` as well. Counters end in `_total`, histograms in `_bucket`, `_sum` and `_count`. Every one has the labels
`model_name` and `engine` (its number, with `--data-parallel-size`). Offline, `LLM.get_metrics()` gives the engine's own
figures.

| name | kind | further labels | what it is |
|---|---|---|---|
"""

TAIL = """
Questions they answer:

- **Is it keeping up?** `rate(kvasir:generation_tokens_total[1m])`, `kvasir:num_requests_waiting`.
- **What do users feel?** `histogram_quantile(0.99, rate(kvasir:time_to_first_token_seconds_bucket[5m]))`, the same of
  `kvasir:inter_token_latency_seconds_bucket`.
- **Is the cache large enough?** `kvasir:kv_cache_usage_perc` near 1 together with
  `rate(kvasir:num_preemptions_total[5m]) > 0` says no.
- **Do prompts share?** `rate(kvasir:prefix_cache_hits_total[5m]) / rate(kvasir:prefix_cache_queries_total[5m])`.
- **When to add a replica?** On `kvasir:queue_size`, which is what autoscalers ask for.
"""


def page() -> str:
    metrics = Metrics("MODEL")
    stats = EngineStats(**{each.name: 1 for each in fields(EngineStats) if each.type == "int"})  # type: ignore[arg-type]
    stats.expert_tokens = {0: {"0-15": 1}}
    engine = engine_metrics([stats], "MODEL")
    cache = cache_metric(fake_config(), [stats])
    found = [*metrics.registry.collect(), *engine, *device_metrics([], "MODEL"), cache]
    labels = {name: made._labelnames for made, names in metrics.registry._collector_to_names.items() for name in names}
    labels |= {metric.name: ("device",) for metric in device_metrics([], "MODEL")}
    labels |= {metric.name: tuple(metric.samples[0].labels) for metric in engine if metric.type != "histogram"}
    return HEAD + "".join(_rows(found, labels)) + TAIL


def _rows(metrics: Iterable[Metric], labels: dict[str, tuple[str, ...]]) -> Iterable[str]:
    for metric in sorted(metrics, key=lambda each: each.name):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        further = [label for label in labels.get(metric.name, ()) if label not in ("model_name", "engine")]
        words = ", ".join(f"`{label}`" for label in further)
        yield f"| `{name}` | {metric.type} | {words} | {metric.documentation} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
