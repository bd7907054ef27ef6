"""`kvasir bench serve`: reads vLLM's flags, runs a load test, prints a table and writes JSON.

It makes the objects of kvasir.bench.serve, which are imported only where they are needed, so that --help is fast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir.config.args import flag
from kvasir.config.env import API_KEY
from kvasir.errors import ConfigError


def run(namespace: argparse.Namespace) -> int:
    options = _options(namespace)
    metadata = _pairs("--metadata", namespace.metadata)
    from kvasir.bench import report, serve
    from kvasir.bench.serve.results import render

    record = serve.run(options)
    record |= {"label": namespace.label} | metadata
    print(render(record, options.metrics, options.percentiles))
    if namespace.json:
        report.write_json(namespace.json, record)
    if namespace.save_result or namespace.append_result:
        path = _result_path(namespace, record)
        _write(path, record, namespace.append_result)
        print(f"written to {path}")
    return 0 if record["completed"] else 1


def _options(namespace: argparse.Namespace) -> Any:
    from kvasir.bench.serve import ServeOptions
    from kvasir.bench.serve.results import Goodput

    detailed = namespace.save_detailed
    if detailed and not (namespace.save_result or namespace.append_result or namespace.json):
        raise ConfigError("--save-detailed needs --save-result or --json FILE.")
    trace = namespace.dataset_name == "trace"
    return ServeOptions(
        endpoint=_endpoint(namespace),
        dataset_name=namespace.dataset_name,
        dataset=_dataset(namespace),
        model=namespace.model,
        served_model_name=namespace.served_model_name,
        tokenizer=namespace.tokenizer,
        num_prompts=namespace.num_prompts,
        arrivals=_arrivals(namespace),
        use_trace_times=trace and namespace.request_rate is None and namespace.ramp_up_strategy is None,
        trace_speedup=1.0 if namespace.trace_speedup is None else namespace.trace_speedup,
        max_concurrency=namespace.max_concurrency,
        fields=_fields(namespace),
        num_warmups=namespace.num_warmups,
        ready_seconds=namespace.ready_check_timeout_sec,
        seed=namespace.seed,
        metrics=_names(namespace.percentile_metrics),
        percentiles=_percentiles(namespace.metric_percentiles),
        goodput=Goodput.parse(namespace.goodput) if namespace.goodput else None,
        keep_details=detailed,
        progress=not namespace.disable_tqdm,
    )


def _endpoint(namespace: argparse.Namespace) -> Any:
    from kvasir.bench.serve.client import ENDPOINTS, Endpoint

    host = f"[{namespace.host}]" if ":" in namespace.host else namespace.host
    key = namespace.api_key or API_KEY.read_text().partition(",")[0] or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Endpoint(
        base_url=(namespace.base_url or f"http://{host}:{namespace.port}").rstrip("/"),
        path=namespace.endpoint or ENDPOINTS[namespace.backend],
        is_chat=namespace.backend == "openai-chat",
        headers=headers | _pairs("--header", namespace.header),
    )


def _arrivals(namespace: argparse.Namespace) -> Any:
    from kvasir.bench.serve.load import Arrivals

    start, end = namespace.ramp_up_start_rps, namespace.ramp_up_end_rps
    if namespace.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
        return Arrivals(math.inf if namespace.request_rate is None else namespace.request_rate, namespace.burstiness)
    if namespace.request_rate is not None:
        raise ConfigError("--request-rate and --ramp-up-strategy exclude each other; set one of them.")
    return Arrivals(math.inf if start is None else start, namespace.burstiness, namespace.ramp_up_strategy, end)


def _dataset(namespace: argparse.Namespace) -> Callable[[Any], Any]:
    chosen = namespace.dataset_name
    given = _lengths(namespace, chosen)
    path = namespace.dataset_path
    if chosen in ("random", "prefix_repetition"):
        if path is not None:
            raise ConfigError(f"--dataset-name {chosen} needs no file; leave --dataset-path out.")
    elif path is None:
        raise ConfigError(f"--dataset-name {chosen} needs --dataset-path.")
    from kvasir.bench.serve import datasets

    if chosen == "trace":
        return lambda served: datasets.trace(path, served.max_model_len)
    makers: Mapping[str, Callable[[], Any]] = {
        "random": lambda: datasets.Random(**given),
        "prefix_repetition": lambda: datasets.PrefixRepetition(**given),
        "sonnet": lambda: datasets.sonnet(path, **given),
        "sharegpt": lambda: datasets.sharegpt(path, **given),
        "custom": lambda: datasets.custom(path, **given),
    }
    made = makers[chosen]()  # now, so that a wrong file is reported before waiting for the server
    return lambda served: made


def _lengths(namespace: argparse.Namespace, chosen: str) -> dict[str, Any]:
    """The options of the chosen dataset. Flags of other datasets are an error."""
    for dataset, flags in LENGTHS.items():
        for name in flags:
            if dataset != chosen and getattr(namespace, name) is not None:
                raise ConfigError(f"{flag(name)} is for --dataset-name {dataset}, not {chosen}.")
    given = {name.removeprefix(chosen + "_"): getattr(namespace, name) for name in LENGTHS[chosen]}
    for name in ("input_len", "output_len"):
        if (value := getattr(namespace, name)) is not None:
            if name not in given:
                raise ConfigError(f"{flag(name)} does not apply to --dataset-name {chosen}.")
            given[name] = value
    return {name: value for name, value in given.items() if value is not None}


def _fields(namespace: argparse.Namespace) -> dict[str, Any]:
    fields = {name: value for name in SAMPLING if (value := getattr(namespace, name)) is not None}
    fields.setdefault("temperature", 0.0)
    ignore_eos = namespace.ignore_eos
    if namespace.dataset_name in SYNTHETIC if ignore_eos is None else ignore_eos:
        fields["ignore_eos"] = True
    if namespace.extra_body is not None:
        try:
            fields |= json.loads(namespace.extra_body)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--extra-body is not a JSON object ({error}).") from None
    return fields


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics: {name} is not one of {', '.join(METRICS)}.")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
        assert all(0 <= each <= 100 for each in found)
    except (ValueError, AssertionError):
        raise ConfigError(f"--metric-percentiles {text} must be numbers from 0 to 100, such as 50,95,99.") from None
    return found


def _pairs(name: str, words: list[str] | None) -> dict[str, str]:
    for word in words or []:
        if "=" not in word:
            raise ConfigError(f"{name} {word}: write it as KEY=VALUE.")
    return dict(word.split("=", 1) for word in words or [])


def _result_path(namespace: argparse.Namespace, record: Mapping[str, Any]) -> Path:
    name: str | None = namespace.result_filename
    if name is None:
        model = re.sub(r"[^\w.-]+", "-", str(record["model_id"]).rstrip("/").split("/")[-1])
        limit = "" if record["max_concurrency"] is None else f"-concurrency{record['max_concurrency']}"
        stamp = re.sub(r"\D", "", record["date"].partition("+")[0])
        name = f"{namespace.label or record['backend']}-{record['request_rate']}qps{limit}-{model}-{stamp}.json"
    return Path(namespace.result_dir or ".") / name


def _write(path: Path, record: Mapping[str, Any], append: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None


# ---------------------------------------------------------------- flags, under vLLM's names

BACKENDS = ("openai", "openai-chat", "vllm")  # vllm is the same as openai
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")

# Flags of each dataset: name -> (default, help).
LENGTHS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "random": {
        "random_input_len": (1024, "tokens per prompt after the shared prefix"),
        "random_output_len": (128, "tokens per output"),
        "random_range_ratio": (0.0, "r varies the lengths uniformly by factors from 1-r to 1+r"),
        "random_prefix_len": (0, "tokens of the prefix that all prompts share"),
    },
    "prefix_repetition": {
        "prefix_repetition_prefix_len": (256, "tokens of each shared prefix"),
        "prefix_repetition_suffix_len": (256, "tokens after the prefix"),
        "prefix_repetition_num_prefixes": (10, "number of prefixes"),
        "prefix_repetition_output_len": (128, "tokens per output"),
    },
    "sonnet": {
        "sonnet_input_len": (550, "tokens per prompt"),
        "sonnet_output_len": (150, "tokens per output"),
        "sonnet_prefix_len": (200, "tokens of the prefix that all prompts share"),
    },
    "sharegpt": {"sharegpt_output_len": (None, "tokens per output (default: as in the dataset)")},
    "custom": {"custom_output_len": (256, "tokens per output")},
    "trace": {"trace_speedup": (1.0, "factor by which the trace is replayed faster")},
}
SYNTHETIC = ("random", "prefix_repetition", "sonnet", "trace")  # their outputs have a fixed length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_datasets(parser.add_argument_group("datasets"))
    _add_requests(parser.add_argument_group("requests"))
    _add_results(parser.add_argument_group("results"))


def _add_target(group: Any) -> None:
    group.add_argument(
        "--backend",
        "--endpoint-type",
        choices=BACKENDS,
        default="openai",
        help="completions or chat API (default: %(default)s)",
    )
    group.add_argument("--base-url", metavar="URL", help="base URL of the server (default: http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="path of the API (default: that of the backend)")
    group.add_argument(
        "--model", metavar="MODEL", help="directory or Hub name of the model (default: the model of the server)"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model on the server")
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer for the prompts (default: the model's)")
    group.add_argument("--api-key", metavar="KEY", help=f"(default: ${API_KEY.name}, $OPENAI_API_KEY)")
    group.add_argument("--header", nargs="+", metavar="NAME=VALUE", help="additional headers")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600,
        metavar="S",
        help="seconds to wait for the server (default: %(default)s)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--num-prompts", type=_count, default=1000, metavar="N", help="number of requests (default: %(default)s)"
    )
    group.add_argument(
        "--request-rate", type=_rate, metavar="R", help="requests per second (default: inf, or the times of a trace)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less is burstier, more is more even (default: 1)",
    )
    group.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="maximum number of concurrent requests (default: no limit)"
    )
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="increase the request rate over time"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="request rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="request rate at the end")
    group.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="number of warm-up requests (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="random seed of prompts and arrivals (default: %(default)s)")


def _add_datasets(group: Any) -> None:
    group.add_argument("--dataset-name", choices=tuple(LENGTHS), default="random", help="(default: %(default)s)")
    group.add_argument("--dataset-path", metavar="FILE", help="file of the datasets sonnet, sharegpt, custom and trace")
    group.add_argument(
        "--input-len", type=_count, metavar="N", help="same as the input or output length flag of the dataset"
    )
    group.add_argument(
        "--output-len", type=_count, metavar="N", help="same as the input or output length flag of the dataset"
    )
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
        help="generate up to the output length (default: only for synthetic datasets)",
    )
    group.add_argument("--extra-body", metavar="JSON", help="additional fields of every request")


def _add_results(group: Any) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests that meet all these limits, such as ttft:200 tpot:50",
    )
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="(default: %(default)s)"
    )
    group.add_argument("--metric-percentiles", default="50,95,99", metavar="P,P", help="(default: %(default)s)")
    group.add_argument("--json", metavar="FILE", help="write the result to FILE as JSON")
    group.add_argument("--save-result", action="store_true", help="write the result to a file with a generated name")
    group.add_argument("--append-result", action="store_true", help="append the result to that file as a line")
    group.add_argument("--save-detailed", action="store_true", help="also save the times and text of every request")
    group.add_argument("--result-dir", metavar="DIR", help="directory of the file (default: the current one)")
    group.add_argument("--result-filename", metavar="NAME", help="name of the file (default: generated)")
    group.add_argument("--metadata", nargs="+", metavar="KEY=VALUE", help="additional entries of the result")
    group.add_argument("--label", help="label in the result and in the generated file name")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests per second, or inf") from None
