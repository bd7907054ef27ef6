"""Computes the results of a load test, with the names of vLLM's result files, and prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.bench import report
from kvasir.bench.serve.client import TimedAnswer
from kvasir.bench.serve.datasets import Prompt
from kvasir.bench.serve.load import Outcome
from kvasir.errors import ConfigError

METRICS: Mapping[str, tuple[str, Callable[[TimedAnswer], Sequence[float]]]] = {
    "ttft": ("time to first token", lambda answer: [answer.first]),
    "tpot": ("time per output token", lambda a: [] if a.per_token is None else [a.per_token]),
    "itl": ("inter-token latency", lambda answer: answer.gaps),
    "e2el": ("end-to-end latency", lambda answer: [answer.ended - answer.started]),
}
LATE_SECONDS = 0.01  # requests sent later than this distort an open loop
BUSY = 0.85  # of a core; above it the client may be the bottleneck


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds, all of which a good request meets."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Goodput:
        limits = {}
        for word in words:
            name, _, value = word.partition(":")
            if name not in ("ttft", "tpot", "e2el"):
                raise ConfigError(f"--goodput {word}: limits are for ttft, tpot and e2el, such as ttft:200.")
            try:
                limits[name] = float(value)
            except ValueError:
                raise ConfigError(f"--goodput {word}: {value!r} is not a number of milliseconds.") from None
        return cls(limits)

    def is_met(self, answer: TimedAnswer) -> bool:
        return all(
            value * 1e3 <= limit for name, limit in self.limits.items() for value in METRICS[name][1](answer)
        )  # fmt: skip


def measure(
    outcome: Outcome,
    prompts: Sequence[Prompt],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Goodput | None,
) -> dict[str, Any]:
    good = [answer for answer in outcome.answers if answer.ok]
    tokens_in = sum(_tokens_in(a, p) for a, p in zip(outcome.answers, prompts, strict=True) if a.ok)
    tokens_out = sum(answer.num_tokens for answer in good)
    seconds = outcome.seconds
    record: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcome.answers) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if goodput is None else sum(map(goodput.is_met, good)) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
        "max_concurrent_requests": outcome.peak,
    }
    for name in metrics:
        record |= _summary(name, [value for answer in good for value in METRICS[name][1](answer)], percentiles)
    return (
        record
        | _client_figures(outcome, good)
        | {"errors_by_kind": dict(Counter(a.error for a in outcome.answers if a.error))}
    )


def _tokens_in(answer: TimedAnswer, prompt: Prompt) -> int:
    return prompt.num_tokens if answer.usage is None else answer.usage.prompt_tokens or prompt.num_tokens


def _summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    values = np.asarray(seconds) * 1e3
    found: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", *(f"p{p:g}" for p in percentiles)))
    if len(values):
        found |= {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())}
        found |= {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}
    return {f"{key}_{name}_ms": value for key, value in found.items()}


def _client_figures(outcome: Outcome, good: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Figures that show whether the client limited the measurement."""
    chunks = sum(len(answer.times) for answer in good)
    tokens = sum(answer.num_tokens for answer in good)
    late = [answer.late for answer in outcome.answers]
    return {
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "client_cpu": outcome.client_cpu,
        "client_late_ms_p99": float(np.percentile(late, 99)) * 1e3 if late else 0.0,
        "tokens_counted_by": "server" if all(answer.usage is not None for answer in good) else "chunks",
    }


def detailed(outcome: Outcome, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Results of every request, in order."""
    answers = outcome.answers
    start = min((answer.started for answer in answers), default=0.0)
    return {
        "input_lens": [_tokens_in(a, p) for a, p in zip(answers, prompts, strict=True)],
        "output_lens": [answer.num_tokens for answer in answers],
        "start_times": [answer.started - start for answer in answers],
        "ttfts": [answer.first if answer.ok else None for answer in answers],
        "itls": [answer.gaps for answer in answers],
        "e2els": [answer.ended - answer.started for answer in answers],
        "generated_texts": ["".join(answer.text or []) for answer in answers],
        "errors": [answer.error for answer in answers],
    }


# ---------------------------------------------------------------- the table


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
    bound = "" if limit is None else f", at most {limit} concurrent"
    yield f"{record['model_id']} at {record['url']}: {record['dataset']}, {how}{bound} (seed {record['seed']})"
    answered, failed = record["completed"], record["failed"]
    yield (
        f"{answered} answered, {failed} failed, in {record['duration']:.2f} s; "
        f"{record['total_input_tokens']:,} tokens in, {record['total_output_tokens']:,} out; "
        f"at most {record['max_concurrent_requests']} concurrent; this client used {record['client_cpu']:.0%} of a core"
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
        yield f"{record['left_out']} requests of the trace are longer than max_model_len and were left out"
    if (record["tokens_per_chunk"] or 0) > 1.05:
        tokens = record["tokens_per_chunk"]
        yield f"a chunk had {tokens:.2f} tokens on average: ITL is the time between chunks, TPOT the time per token"
    if record["tokens_counted_by"] != "server":
        yield "the server does not report token counts, so each chunk counts as one token"
    if record["client_cpu"] > BUSY:
        yield "this client was busy all the time, so it may be the bottleneck instead of the server"
    if record["client_late_ms_p99"] > LATE_SECONDS * 1e3:
        late = record["client_late_ms_p99"]
        yield f"1 % of the requests were sent at least {late:.0f} ms late: this machine is too busy to send on time"
