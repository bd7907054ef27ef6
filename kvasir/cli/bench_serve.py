"""`kvasir bench serve`: vLLM's flags in, a load test, a table and JSON out.

Turns flags into kvasir.bench.serve's objects, which are imported only where they are made.
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

from kvasir.args import flag
from kvasir.cli.bench_serve_flags import LENGTHS, METRICS, SAMPLING, SYNTHETIC
from kvasir.cli.bench_serve_flags import add_arguments as add_arguments
from kvasir.env import API_KEY
from kvasir.errors import ConfigError


def run(namespace: argparse.Namespace) -> int:
    options = _options(namespace)
    metadata = _pairs("--metadata", namespace.metadata)
    from kvasir.bench import report
    from kvasir.bench.serve import run as bench
    from kvasir.bench.serve.show import render

    record = bench.run(options)
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
    from kvasir.bench.serve.figures import Goodput
    from kvasir.bench.serve.run import ServeOptions

    detailed = namespace.save_detailed
    if detailed and not (namespace.save_result or namespace.append_result or namespace.json):
        raise ConfigError("--save-detailed says what to save: add --save-result or --json FILE.")
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
    from kvasir.bench.serve.target import ENDPOINTS, Endpoint

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
    from kvasir.bench.serve.arrivals import Arrivals

    start, end = namespace.ramp_up_start_rps, namespace.ramp_up_end_rps
    if namespace.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
        return Arrivals(math.inf if namespace.request_rate is None else namespace.request_rate, namespace.burstiness)
    if namespace.request_rate is not None:
        raise ConfigError("--request-rate is one rate, and --ramp-up-strategy lets it grow: give one of them.")
    return Arrivals(math.inf if start is None else start, namespace.burstiness, namespace.ramp_up_strategy, end)


def _dataset(namespace: argparse.Namespace) -> Callable[[Any], Any]:
    chosen = namespace.dataset_name
    given = _lengths(namespace, chosen)
    path = namespace.dataset_path
    if chosen in ("random", "prefix_repetition"):
        if path is not None:
            raise ConfigError(f"--dataset-name {chosen} is made up; leave --dataset-path out.")
    elif path is None:
        raise ConfigError(f"--dataset-name {chosen} needs --dataset-path.")
    from kvasir.bench.serve import files, prompts

    if chosen == "trace":
        return lambda served: files.trace(path, served.max_model_len)
    makers: Mapping[str, Callable[[], Any]] = {
        "random": lambda: prompts.Random(**given),
        "prefix_repetition": lambda: prompts.PrefixRepetition(**given),
        "sonnet": lambda: files.sonnet(path, **given),
        "sharegpt": lambda: files.sharegpt(path, **given),
        "custom": lambda: files.custom(path, **given),
    }
    made = makers[chosen]()  # now: what is wrong with a file should not wait for the server
    return lambda served: made


def _lengths(namespace: argparse.Namespace, chosen: str) -> dict[str, Any]:
    """The flags of the chosen dataset, without its name; any other's are an error."""
    for dataset, flags in LENGTHS.items():
        for name in flags:
            if dataset != chosen and getattr(namespace, name) is not None:
                raise ConfigError(f"{flag(name)} is for --dataset-name {dataset}, and this is {chosen}.")
    given = {name.removeprefix(chosen + "_"): getattr(namespace, name) for name in LENGTHS[chosen]}
    for name in ("input_len", "output_len"):
        if (value := getattr(namespace, name)) is not None:
            if name not in given:
                raise ConfigError(f"{flag(name)} does not go with --dataset-name {chosen}.")
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
        raise ConfigError(f"--metric-percentiles {text}: numbers from 0 to 100, as in 50,95,99.") from None
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
