"""`kvasir bench`: reads the flags, runs a benchmark, prints a table and, with --json, writes a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir.config.args import EngineArgs
from kvasir.entrypoints.cli import bench_serve
from kvasir.errors import ConfigError
from kvasir.models import hub

PROMPT_FLAGS = ("num_prompts", "input_len", "output_len")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_throughput(commands.add_parser("throughput", help="tokens per second with many requests at once"))
    _add_latency(commands.add_parser("latency", help="time to first token, and time per token after it"))
    bench_serve.add_arguments(commands.add_parser("serve", help="a server under load: latency, throughput, goodput"))
    _add_embed(commands.add_parser("embed", help="texts per second of a pooling model"))
    _add_startup(commands.add_parser("startup", help="time from process start to first token, by phase"))


def run(namespace: argparse.Namespace) -> int:
    _check_json(namespace.json)
    if namespace.benchmark == "serve":
        return bench_serve.run(namespace)
    hub.use_starter_by_default(namespace)
    known = {"throughput": _throughput, "latency": _latency, "startup": _startup, "embed": _embed}
    measure = known[namespace.benchmark]
    if namespace.benchmark != "startup":
        namespace.skip_tokenizer_init = True  # prompts are token ids, and outputs are not decoded
    record, text = measure(namespace)
    print(text)
    if namespace.json:
        from kvasir.bench import report

        report.write_json(namespace.json, record)
    return 0


def _throughput(namespace: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kvasir.bench import throughput

    given = _given(namespace, "workload", *PROMPT_FLAGS, "repeat", "compare", "compare_batch")
    if "workload" in given and (also := [name for name in PROMPT_FLAGS if name in given]):
        flags = ", ".join("--" + name.replace("_", "-") for name in also)
        raise ConfigError(f"--workload defines the requests; leave out {flags}.")
    if "compare_batch" in given and "compare" not in given:
        raise ConfigError("--compare-batch needs --compare transformers.")
    record = throughput.run(EngineArgs.from_cli_args(namespace), throughput.ThroughputOptions(**given))
    return record, throughput.render(record)


def _latency(namespace: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kvasir.bench import latency

    given = _given(namespace, "input_len", "output_len", "batch_size", "num_iters", "compare")
    record = latency.run(EngineArgs.from_cli_args(namespace), latency.LatencyOptions(**given))
    return record, latency.render(record)


def _embed(namespace: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kvasir.bench import embed

    given = _given(namespace, "num_prompts", "input_len", "repeat")
    record = embed.run(EngineArgs.from_cli_args(namespace), embed.EmbedOptions(**given))
    return record, embed.render(record)


def _startup(namespace: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kvasir.bench import startup

    given = _given(namespace, "num_iters_cold", "num_iters_warm")
    record = startup.run(EngineArgs.from_cli_args(namespace), startup.StartupOptions(**given))
    return record, startup.render(record)


# ---------------------------------------------------------------- flags


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--num-prompts", type=_count, metavar="N", help="number of requests (default: 64)")
    group.add_argument("--input-len", type=_span, metavar="N|A:B", help="tokens per prompt, or a range (default: 128)")
    group.add_argument("--output-len", type=_span, metavar="N|A:B", help="tokens per output, or a range (default: 128)")
    group.add_argument(
        "--workload",
        metavar="mixed:N|FILE",
        help="mixed:N is N requests with 32-256 prompt and 16-128 output tokens; "
        'FILE has {"prompt_token_ids": [...], "max_tokens": n} per line',
    )
    group.add_argument(
        "--repeat", type=_count, metavar="N", help="number of rounds, of which the median is reported (default: 1)"
    )
    group.add_argument(
        "--compare-batch", type=_count, metavar="N", help="batch size of the other engine (default: all requests)"
    )
    _add_shared(parser, group)


def _add_latency(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--input-len", type=_count, metavar="N", help="tokens per prompt (default: 128)")
    group.add_argument("--output-len", type=_count, metavar="N", help="tokens per output (default: 64)")
    group.add_argument("--batch-size", type=_count, metavar="N", help="number of concurrent requests (default: 1)")
    group.add_argument(
        "--num-iters", type=_count, metavar="N", help="number of rounds, of which the median is reported (default: 5)"
    )
    _add_shared(parser, group)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--num-prompts", type=_count, metavar="N", help="number of texts (default: 512)")
    group.add_argument("--input-len", type=_span, metavar="N|A:B", help="tokens per text, or a range (default: 16:128)")
    group.add_argument(
        "--repeat", type=_count, metavar="N", help="number of rounds, of which the median is reported (default: 3)"
    )
    group.add_argument("--json", metavar="FILE", help="write the result to FILE as JSON")
    EngineArgs.add_cli_args(parser)


def _add_startup(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("starts")
    group.add_argument(
        "--num-iters-cold", type=_whole, metavar="N", help="number of starts with empty kernel caches (default: 2)"
    )
    group.add_argument(
        "--num-iters-warm", type=_whole, metavar="N", help="number of starts with filled kernel caches (default: 3)"
    )
    group.add_argument("--json", "--output-json", metavar="FILE", help="write the result to FILE as JSON")
    EngineArgs.add_cli_args(parser)


def _add_shared(parser: argparse.ArgumentParser, group: Any) -> None:
    group.add_argument(
        "--compare",
        choices=("transformers",),
        help="also run the same requests with this engine, in alternating rounds",
    )
    group.add_argument("--json", metavar="FILE", help="write the result to FILE as JSON")
    EngineArgs.add_cli_args(parser)  # --seed also applies to the prompts


def _given(namespace: argparse.Namespace, *names: str) -> Mapping[str, Any]:
    """The flags that were given; the options have defaults for the others."""
    return {name: value for name in names if (value := getattr(namespace, name)) is not None}


def _check_json(path: str | None) -> None:
    """Raise before the benchmark runs if its result cannot be written."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: the directory does not exist.")


def _span(text: str) -> Any:
    from kvasir.bench.workloads import Span

    return _or_argument_error(Span.parse, text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _or_argument_error(parse: Callable[[str], Any], text: str) -> Any:
    """Convert a flag's text. Argparse would replace the message of a ConfigError, which is a ValueError."""
    try:
        return parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
