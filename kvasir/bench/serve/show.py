"""What people read of a load test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir.bench import report
from kvasir.bench.serve.figures import BUSY, LATE_SECONDS, METRICS


def render(record: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    columns = ["mean", *(f"p{p:g}" for p in percentiles)]
    header = ["milliseconds", *columns]
    rows = [
        [f"{name.upper()}  {METRICS[name][0]}", *(record[f"{column}_{name}_ms"] for column in columns)]
        for name in metrics
    ]
    lines = [*_totals(record), "", report.table(header, rows)]
    warnings = list(_warnings(record))
    return "\n".join([*lines, "", *warnings] if warnings else lines)


def _totals(record: Mapping[str, Any]) -> Iterator[str]:
    rate, limit = record["request_rate"], record["max_concurrency"]
    pace = {"inf": "all at once", "trace": f"as in the trace, {record['trace_speedup'] or 1:g} times as fast"}
    how = pace.get(rate, f"{rate} requests/s, burstiness {record['burstiness']:g}")
    bound = "" if limit is None else f", at most {limit} at once"
    yield f"{record['model_id']} at {record['url']}: {record['dataset']}, {how}{bound} (seed {record['seed']})"
    answered, failed = record["completed"], record["failed"]
    yield (
        f"{answered} answered, {failed} failed, in {record['duration']:.2f} s; "
        f"{record['total_input_tokens']:,} tokens in, {record['total_output_tokens']:,} out; "
        f"at most {record['max_concurrent_requests']} in flight; this client used {record['client_cpu']:.0%} of a core"
    )
    words = [f"{record['request_throughput']:.2f} requests/s"]
    if record["request_goodput"] is not None:
        words.append(f"goodput {record['request_goodput']:.2f} requests/s within {record['goodput']}")
    words += [f"{record['output_throughput']:,.1f} out tok/s", f"{record['total_token_throughput']:,.1f} in+out tok/s"]
    yield ", ".join(words)


def _warnings(record: Mapping[str, Any]) -> Iterator[str]:
    for error, count in sorted(record["errors_by_kind"].items(), key=lambda item: -item[1])[:5]:
        yield f"{count} failed: {error}"
    if record["left_out"]:
        yield f"{record['left_out']} requests of the trace are longer than the server takes and were left out"
    if (record["tokens_per_chunk"] or 0) > 1.05:
        yield f"a chunk had {record['tokens_per_chunk']:.2f} tokens on average: ITL is between chunks, TPOT per token"
    if record["tokens_counted_by"] != "server":
        yield "the server does not count tokens: each chunk is taken for one"
    if record["client_cpu"] > BUSY:
        yield "this client had hardly a moment to spare: it may be the limit, not the server"
    if record["client_late_ms_p99"] > LATE_SECONDS * 1e3:
        late = record["client_late_ms_p99"]
        yield f"one request in a hundred was sent {late:.0f} ms late or more: this machine is too busy to send on time"
