"""`kvasir bench throughput`: tokens per second with all requests at once, optionally compared with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvasir.bench import report
from kvasir.bench.runners import KvasirRunner, Runner, Timed, alternate, make_peer, paired_ratio, timed
from kvasir.bench.workloads import BenchRequest, Span, cut, named, uniform
from kvasir.config.args import EngineArgs
from kvasir.entrypoints.llm import LLM

WARM_UP_TOKENS = 4
DEFAULT_LENGTH = Span(128, 128)
COUNTERS = {"steps": "engine_steps", "prefix_hits": "prefix_cache_hits", "preemptions": "num_preemptions"}


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    workload: str | None = None  # None uses the next three fields
    num_prompts: int = 64
    input_len: Span = DEFAULT_LENGTH
    output_len: Span = DEFAULT_LENGTH
    repeat: int = 1
    compare: str | None = None  # "transformers"
    compare_batch: int | None = None  # None means all requests, up to max_num_seqs

    @property
    def name(self) -> str:
        return self.workload or f"{self.num_prompts} x {self.input_len} in, {self.output_len} out"

    def requests(self, vocab_size: int, seed: int) -> list[BenchRequest]:
        if self.workload is not None:
            return named(self.workload, vocab_size, seed)
        return uniform(self.num_prompts, self.input_len, self.output_len, vocab_size, seed)


def run(args: EngineArgs, options: ThroughputOptions) -> dict[str, Any]:
    """Run the benchmark and return its record: conditions, sizes, and results of each runner."""
    with LLM.from_engine_args(args) as llm:
        config = llm.llm_engine.config
        record = {"benchmark": "throughput", **report.conditions(config), "seed": config.model.seed}
        requests = options.requests(config.model.vocab_size, config.model.seed)
        kvasir = KvasirRunner(llm)
        runners: list[Runner] = [kvasir]
        if options.compare:
            width = options.compare_batch or min(len(requests), config.scheduler.max_num_seqs)
            runners.append(make_peer(options.compare, config, width))
        rounds, counters = _measure(runners, kvasir, requests, options.repeat)
    record |= _sizes(options, requests)
    record["results"] = {runner.name: _figures(rounds[runner.name], requests) for runner in runners}
    record["results"]["kvasir"] |= counters
    if options.compare:
        record["results"][options.compare] |= _peer_figures(runners[1], requests)
        record["comparison"] = _compare(rounds["kvasir"], rounds[options.compare])
    return record


def _measure(
    runners: Sequence[Runner], kvasir: KvasirRunner, requests: Sequence[BenchRequest], repeat: int
) -> tuple[dict[str, list[Timed]], dict[str, int]]:
    """All rounds of all runners, and the engine's counters of its last round."""
    rounds: dict[str, list[Timed]] = {runner.name: [] for runner in runners}
    counters: dict[str, int] = {}

    def once(runner: Runner, round: int) -> None:
        before = kvasir.counters()
        rounds[runner.name].append(timed(runner, requests))
        if runner is kvasir:
            after = kvasir.counters()
            counters.update({name: after[counter] - before[counter] for name, counter in COUNTERS.items()})

    for runner in runners:
        runner.generate(cut(requests, WARM_UP_TOKENS))
    alternate(runners, repeat, once)
    return rounds, counters


# ---------------------------------------------------------------- the record


def _sizes(options: ThroughputOptions, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    return {
        "workload": options.name,
        "requests": len(requests),
        "in_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "out_tokens": sum(request.max_tokens for request in requests),
        "repeat": options.repeat,
    }


def _figures(rounds: Sequence[Timed], requests: Sequence[BenchRequest]) -> dict[str, Any]:
    seconds = median(one.seconds for one in rounds)
    tokens_in = sum(len(request.prompt_token_ids) for request in requests)
    tokens_out = sum(len(tokens) for tokens in rounds[-1].tokens)
    return {
        "seconds": seconds,
        "out_tok_s": tokens_out / seconds,
        "total_tok_s": (tokens_in + tokens_out) / seconds,
        "out_tokens": tokens_out,
        "all_seconds": [one.seconds for one in rounds],
        "other_load": [one.others for one in rounds],
    }


def _peer_figures(peer: Any, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    return {
        "version": peer.version,
        "batch_size": peer.batch_size,
        "padded_tokens": peer.padded_tokens(requests),
    }


def _compare(ours: Sequence[Timed], theirs: Sequence[Timed]) -> dict[str, Any]:
    same = sum(a == b for a, b in zip(ours[-1].tokens, theirs[-1].tokens, strict=True))
    speed = paired_ratio([one.seconds for one in theirs], [one.seconds for one in ours])
    return {"speed_ratio": speed, "requests_with_same_tokens": same}


# ---------------------------------------------------------------- the table


def render(record: Mapping[str, Any]) -> str:
    header = ["", "seconds", "out tok/s", "in+out tok/s", "steps", "prefix hits", "preemptions", "other load"]
    rows = [
        [
            name, f["seconds"], f["out_tok_s"], f["total_tok_s"], *(f.get(counter) for counter in COUNTERS),
            report.load(f["other_load"]),
        ]
        for name, f in record["results"].items()
    ]  # fmt: skip
    lines = [
        f"{record['model']}: {record['workload']} (seed {record['seed']}), {record['requests']} requests, "
        f"{record['in_tokens']:,} tokens in, {record['out_tokens']:,} out",
        report.conditions_line(record),
        "",
        report.table(header, rows),
    ]
    if "comparison" in record:
        lines += ["", *_render_comparison(record)]
    return "\n".join(lines)


def _render_comparison(record: Mapping[str, Any]) -> list[str]:
    (name, peer), comparison = list(record["results"].items())[1], record["comparison"]
    return [
        report.ratio_line(f"kvasir / {name}", comparison["speed_ratio"], record["repeat"]),
        f"{name} {peer['version']}: static batches of {peer['batch_size']}, "
        f"{peer['padded_tokens']:,} tokens with padding",
        f"the same tokens for {comparison['requests_with_same_tokens']} of {record['requests']} requests",
    ]
