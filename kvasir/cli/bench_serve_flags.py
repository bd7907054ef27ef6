"""The flags of `kvasir bench serve`, under vLLM's names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kvasir.args import flag
from kvasir.env import API_KEY

BACKENDS = ("openai", "openai-chat", "vllm")  # the last means the first
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")

# The datasets' own flags: name, default, help. Those of a dataset that is not chosen are refused.
LENGTHS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "random": {
        "random_input_len": (1024, "tokens of a prompt after the shared prefix"),
        "random_output_len": (128, "tokens of an answer"),
        "random_range_ratio": (0.0, "r: lengths vary evenly from (1-r) to (1+r) times those"),
        "random_prefix_len": (0, "tokens that all prompts begin with"),
    },
    "prefix_repetition": {
        "prefix_repetition_prefix_len": (256, "tokens of each shared prefix"),
        "prefix_repetition_suffix_len": (256, "tokens after it"),
        "prefix_repetition_num_prefixes": (10, "how many prefixes there are"),
        "prefix_repetition_output_len": (128, "tokens of an answer"),
    },
    "sonnet": {
        "sonnet_input_len": (550, "tokens of a prompt"),
        "sonnet_output_len": (150, "tokens of an answer"),
        "sonnet_prefix_len": (200, "tokens that all prompts begin with"),
    },
    "sharegpt": {"sharegpt_output_len": (None, "tokens of an answer (default: as in the dataset)")},
    "custom": {"custom_output_len": (256, "tokens of an answer")},
    "trace": {"trace_speedup": (1.0, "replay the trace so many times as fast")},
}
SYNTHETIC = ("random", "prefix_repetition", "sonnet", "trace")  # their answers have a length, whatever the model says


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("the load"))
    _add_datasets(parser.add_argument_group("datasets"))
    _add_requests(parser.add_argument_group("requests"))
    _add_results(parser.add_argument_group("results"))


def _add_target(group: Any) -> None:
    group.add_argument("--backend", "--endpoint-type", choices=BACKENDS, default="openai", help="completions or chat")
    group.add_argument("--base-url", metavar="URL", help="(default: http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    group.add_argument("--model", metavar="MODEL", help="its files or hub name (default: what the server serves)")
    group.add_argument("--served-model-name", metavar="NAME", help="its name at the server")
    group.add_argument("--tokenizer", metavar="PATH", help="makes and counts prompts (default: the model's)")
    group.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY.name}, $OPENAI_API_KEY)")
    group.add_argument("--header", nargs="+", metavar="NAME=VALUE", help="further headers")
    group.add_argument("--ready-check-timeout-sec", type=float, default=600, metavar="S", help="(default: %(default)s)")


def _add_load(group: Any) -> None:
    group.add_argument("--num-prompts", type=_count, default=1000, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--request-rate", type=_rate, metavar="R", help="per second (default: inf, all at once; a trace has its own)"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: bursts; more: even (default: 1)"
    )
    group.add_argument("--max-concurrency", type=_count, metavar="N", help="most requests at once (default: no limit)")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="from so many requests per second")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="to so many")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")


def _add_datasets(group: Any) -> None:
    group.add_argument("--dataset-name", choices=tuple(LENGTHS), default="random", help="(default: %(default)s)")
    group.add_argument("--dataset-path", metavar="FILE", help="of sonnet, sharegpt, custom and trace")
    group.add_argument("--input-len", type=_count, metavar="N", help="short for the dataset's own flag")
    group.add_argument("--output-len", type=_count, metavar="N", help="short for the dataset's own flag")
    for flags in LENGTHS.values():
        for name, (default, text) in flags.items():
            kind = float if isinstance(default, float) else int
            shown = text if default is None else f"{text} (default: {default})"
            group.add_argument(flag(name), type=kind, metavar="N", help=shown)


def _add_requests(group: Any) -> None:
    for name in SAMPLING:
        default = " (default: 0)" if name == "temperature" else ""
        group.add_argument(flag(name), type=int if name == "top_k" else float, metavar="X", help=name + default)
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="go on to the wanted length (default: yes where the dataset is made up)",
    )
    group.add_argument("--extra-body", metavar="JSON", help="further fields of every request")


def _add_results(group: Any) -> None:
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="count requests within all of these, as ttft:200 tpot:50"
    )
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="(default: %(default)s)"
    )
    group.add_argument("--metric-percentiles", default="50,95,99", metavar="P,P", help="(default: %(default)s)")
    group.add_argument("--json", metavar="FILE", help="write the result there as JSON")
    group.add_argument("--save-result", action="store_true", help="write it to a file with a name of its own")
    group.add_argument("--append-result", action="store_true", help="add it to that file as a line")
    group.add_argument("--save-detailed", action="store_true", help="with every request's times and text")
    group.add_argument("--result-dir", metavar="DIR", help="(default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: made of what was measured)")
    group.add_argument("--metadata", nargs="+", metavar="KEY=VALUE", help="entries to add to the result")
    group.add_argument("--label", help="an entry of the result, and the beginning of its file's name")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests per second, or inf") from None
