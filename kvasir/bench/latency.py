"""`kvasir bench latency`: time to first token, and time per token after it, of a batch that starts together.

Time to first token is that of a call for one token; time per token comes from the rest of a longer call. Both calls
have different prompts of the same length, so that neither hits the other's prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvasir.bench import report
from kvasir.bench.runners import KvasirRunner, Runner, Timed, alternate, make_peer, paired_ratio, timed
from kvasir.bench.workloads import BenchRequest, Span, cut, uniform
from kvasir.config.args import EngineArgs
from kvasir.entrypoints.llm import LLM
from kvasir.errors import ConfigError

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    input_len: int = 128
    output_len: int = 64
    batch_size: int = 1
    num_iters: int = 5
    compare: str | None = None  # "transformers"

    def __post_init__(self) -> None:
        if self.output_len < 2:
            raise ConfigError(
                "--output-len must be at least 2, because time per token is measured after the first token."
            )


@dataclass(frozen=True, slots=True)
class Iteration:
    first: Timed  # for one token
    whole: Timed  # for all tokens


def run(args: EngineArgs, options: LatencyOptions) -> dict[str, Any]:
    """Run the benchmark and return its record: conditions, sizes, and results of each runner."""
    with LLM.from_engine_args(args) as llm:
        config = llm.llm_engine.config
        record = {"benchmark": "latency", **report.conditions(config), "seed": config.model.seed}
        if options.batch_size > config.scheduler.max_num_seqs:
            raise ConfigError(
                f"--batch-size {options.batch_size} is more than max_num_seqs={config.scheduler.max_num_seqs}; raise "
                f"--max-num-seqs."
            )
        runners: list[Runner] = [KvasirRunner(llm)]
        if options.compare:
            runners.append(make_peer(options.compare, config, options.batch_size))
        measured = _measure(runners, options, config.model.vocab_size, config.model.seed)
    record |= {
        "input_len": options.input_len,
        "output_len": options.output_len,
        "batch_size": options.batch_size,
        "num_iters": options.num_iters,
        "results": {name: _figures(iterations, options) for name, iterations in measured.items()},
    }
    if options.compare:
        ours, theirs = (record["results"][name] for name in ("kvasir", options.compare))
        record["comparison"] = {
            "ttft_ratio": paired_ratio(theirs["all_ttft_ms"], ours["all_ttft_ms"]),
            "token_ratio": paired_ratio(theirs["all_ms_per_token"], ours["all_ms_per_token"]),
        }
    return record


def _measure(
    runners: Sequence[Runner], options: LatencyOptions, vocab_size: int, seed: int
) -> dict[str, list[Iteration]]:
    measured: dict[str, list[Iteration]] = {runner.name: [] for runner in runners}

    def prompts(number: int) -> list[BenchRequest]:
        lengths = Span(options.input_len, options.input_len), Span(options.output_len, options.output_len)
        return uniform(options.batch_size, *lengths, vocab_size, seed * 1_000_003 + number)

    def once(runner: Runner, round: int) -> None:
        first = timed(runner, cut(prompts(2 * round), 1))
        measured[runner.name].append(Iteration(first, timed(runner, prompts(2 * round + 1))))

    for runner in runners:
        runner.generate(cut(prompts(2 * options.num_iters), WARM_UP_TOKENS))
    alternate(runners, options.num_iters, once)
    return measured


def _figures(iterations: Sequence[Iteration], options: LatencyOptions) -> dict[str, Any]:
    first = [1e3 * one.first.seconds for one in iterations]
    rest = [1e3 * (one.whole.seconds - one.first.seconds) / (options.output_len - 1) for one in iterations]
    return {
        "ttft_ms": median(first),
        "ms_per_token": median(rest),
        "out_tok_s": options.batch_size * 1e3 / median(rest),  # while all requests decode
        "all_ttft_ms": first,
        "all_ms_per_token": rest,
        "other_load": [one.whole.others for one in iterations],
    }


def render(record: Mapping[str, Any]) -> str:
    rows = [
        [
            name, f["ttft_ms"], f["ms_per_token"], min(f["all_ms_per_token"]), max(f["all_ms_per_token"]),
            f["out_tok_s"], report.load(f["other_load"]),
        ]
        for name, f in record["results"].items()
    ]  # fmt: skip
    lines = [
        f"{record['model']}: {record['batch_size']} x {record['input_len']} in, {record['output_len']} out, "
        f"median of {record['num_iters']} (seed {record['seed']})",
        report.conditions_line(record),
        "",
        report.table(["", "TTFT ms", "ms/token", "min", "max", "decode tok/s", "other load"], rows),
    ]
    if "comparison" in record:
        name = list(record["results"])[1]
        lines += [
            "",
            report.ratio_line(f"TTFT, {name} / kvasir", record["comparison"]["ttft_ratio"], record["num_iters"]),
            report.ratio_line(f"ms/token, {name} / kvasir", record["comparison"]["token_ratio"], record["num_iters"]),
        ]
    return "\n".join(lines)
