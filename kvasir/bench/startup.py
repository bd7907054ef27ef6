"""`kvasir bench startup`: time from the start of a fresh process to its first token, by phase.

A cold start has empty caches of compiled kernels, and the model's files are dropped from the page cache if the system
allows it; files of Python and shared libraries may still be in it. A warm start uses the kernel caches that an earlier
start has filled. These caches are temporary directories; the user's own are not touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.bench import report
from kvasir.bench.report import OtherLoad
from kvasir.config import startup
from kvasir.config.args import EngineArgs
from kvasir.errors import ConfigError, EngineError, KvasirError

PROGRAM = """
import sys, time
entered = time.time()
from kvasir.bench.startup import main
main(entered, *sys.argv[1:])
"""
INTERPRETER = "interpreter"
PROMPT_TOKENS = 16
NEXT_TOKENS = 16
REST = "unaccounted"
# Environment variables that set the cache directories of kernel compilers.
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class StartupOptions:
    num_iters_cold: int = 2
    num_iters_warm: int = 3

    def __post_init__(self) -> None:
        if self.num_iters_cold + self.num_iters_warm == 0:
            raise ConfigError("--num-iters-cold and --num-iters-warm are both 0; set at least one.")


def run(args: EngineArgs, options: StartupOptions) -> dict[str, Any]:
    settings = {name: value for name, value in vars(args).items() if not name.startswith("_")}
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    dropped = True
    with tempfile.TemporaryDirectory(prefix="kvasir-startup-") as directory:
        caches = Path(directory) / "caches-0"
        for number in range(options.num_iters_cold):
            caches = Path(directory) / f"caches-{number}"
            dropped = drop_from_page_cache(args.model) and dropped
            runs["cold"].append(_once(settings, caches))
        if not runs["cold"]:
            _once(settings, caches)  # fills the caches
        runs["warm"] = [_once(settings, caches) for _ in range(options.num_iters_warm)]
    return _record(runs, options, dropped)


def _once(settings: Mapping[str, Any], caches: Path) -> dict[str, Any]:
    """Start one process with these cache directories."""
    caches.mkdir(exist_ok=True)
    result = caches.parent / "result.json"
    result.unlink(missing_ok=True)
    variables = {name: str(caches / name.lower()) for name in CACHES}
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **variables, "PYTHONPATH": paths}
    environment.setdefault("KVASIR_LOG_LEVEL", "WARNING")
    command = [sys.executable, "-c", PROGRAM, repr(time.time()), json.dumps(settings), str(result)]
    load = OtherLoad()
    ran = subprocess.run(command, env=environment, stdout=2)  # output goes to stderr, to keep it apart from the result
    record: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    if "error" in record:
        raise ConfigError(str(record["error"]))
    if ran.returncode != 0 or not record:
        raise EngineError(f"The measured process ended with status {ran.returncode}; see its output above.")
    record["other_load"] = load.fraction()
    record["phases"][REST] = record["total"] - sum(record["phases"].values())
    return record


def drop_from_page_cache(model: str) -> bool:
    """Drop the model's files from the page cache. Returns False if that is not possible."""
    if not hasattr(os, "posix_fadvise"):
        return False
    files = list(_files(Path(model).expanduser()))
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return bool(files)


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
    elif model.is_dir():
        yield from (file for file in model.iterdir() if file.is_file())


# ---------------------------------------------------------------- the measured process
# It loads a model, generates one token and reports the phases. The time before `main` is the phase "interpreter".


def main(entered: float, spawned: str, settings: str, result: str) -> None:
    """`spawned` is the time at which the parent started this process, in seconds since the epoch."""
    try:
        record = _measure(entered, float(spawned), json.loads(settings))
    except KvasirError as error:
        record = {"error": str(error)}
    Path(result).write_text(json.dumps(record), encoding="utf-8")
    sys.exit("error" in record)


def _measure(entered: float, spawned: float, settings: dict[str, Any]) -> dict[str, Any]:
    startup.seconds[INTERPRETER] = entered - spawned
    startup.seconds[startup.IMPORTS] = time.time() - entered  # of this module
    with startup.phase(startup.IMPORTS):
        from kvasir.config.args import EngineArgs
        from kvasir.entrypoints.llm import LLM
    with LLM.from_engine_args(EngineArgs(**settings)) as llm:
        config = llm.llm_engine.config
        with startup.phase(startup.FIRST_TOKEN):
            _generate(llm, 1, config.model.vocab_size)
        whole = time.time() - spawned
        began = time.perf_counter()
        _generate(llm, NEXT_TOKENS, config.model.vocab_size)
        following = time.perf_counter() - began
        from kvasir.bench import report

        return {
            "conditions": report.conditions(config),
            "load_format": config.load.load_format,
            "total": whole,
            "phases": dict(startup.seconds),
            "next_tokens": following,
        }


def _generate(llm: Any, count: int, vocab_size: int) -> None:
    from kvasir.frontend.requests.prompts import TokensPrompt
    from kvasir.sampling_params import SamplingParams

    prompt = TokensPrompt(prompt_token_ids=[token % vocab_size for token in range(1, PROMPT_TOKENS + 1)])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    llm.generate(prompt, params, use_tqdm=False)


# ---------------------------------------------------------------- the record and the table


def _record(runs: Mapping[str, Sequence[dict[str, Any]]], options: StartupOptions, dropped: bool) -> dict[str, Any]:
    first = next(one for some in runs.values() for one in some)
    return {
        "benchmark": "startup",
        **first["conditions"],
        "load_format": first["load_format"],
        "num_iters_cold": options.num_iters_cold,
        "num_iters_warm": options.num_iters_warm,
        "model_files_dropped_from_page_cache": dropped and bool(runs["cold"]),
        "results": {kind: _figures(some) for kind, some in runs.items() if some},
    }


def _figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "total": median(one["total"] for one in runs),
        "phases": {name: median(one["phases"].get(name, 0.0) for one in runs) for name in runs[0]["phases"]},
        "next_tokens": median(one["next_tokens"] for one in runs),
        "other_load": [one["other_load"] for one in runs],
        "all_totals": [one["total"] for one in runs],
        "all_phases": [one["phases"] for one in runs],
    }


def render(record: Mapping[str, Any]) -> str:
    results = record["results"]
    names = list(dict.fromkeys(name for figures in results.values() for name in figures["phases"]))
    rows: list[list[object]] = [
        [name, *(figures["phases"].get(name) for figures in results.values())] for name in names
    ]
    rows.append(["process start to first token", *(figures["total"] for figures in results.values())])
    rows.append(["min", *(min(figures["all_totals"]) for figures in results.values())])
    rows.append(["max", *(max(figures["all_totals"]) for figures in results.values())])
    rows.append([f"the next {NEXT_TOKENS} tokens", *(figures["next_tokens"] for figures in results.values())])
    rows.append(["other load", *(report.load(figures["other_load"]) for figures in results.values())])
    counts = ", ".join(f"{len(figures['all_totals'])} {kind}" for kind, figures in results.items())
    return "\n".join(
        [
            f"{record['model']} ({record['load_format']}): {PROMPT_TOKENS} prompt tokens; medians of {counts} starts",
            report.conditions_line(record),
            "",
            report.table(["seconds", *results], rows),
            "",
            *_notes(record),
        ]
    )


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    if "cold" in record["results"]:
        files = "dropped from" if record["model_files_dropped_from_page_cache"] else "possibly in"
        yield f"cold: empty kernel caches; the model's files {files} the page cache"
    if "warm" in record["results"]:
        yield "warm: kernel caches filled by an earlier start; files in the page cache"
