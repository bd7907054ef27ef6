"""Keeps the record of GPU runs: turns a log's RESULT lines into lines of results.jsonl, and prints them beside vLLM's.

    python benchmarks/h200/record.py                 print the table
    python benchmarks/h200/record.py LOG [LOG ...]   append a log's RESULT lines with commit and date of now; print
    python benchmarks/h200/record.py --add FILE      append records made elsewhere (run.py --out); print

A line is what measure.py printed, plus the commit, the date, the machine and the run it belongs to. Without
git, KVASIR_COMMIT names the commit. Plain Python: runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.jsonl"
VLLM = HERE / "vllm_0_25_1.json"
MARK = "RESULT "

Record = dict[str, Any]


def read_results(lines: Iterable[str]) -> list[Record]:
    """The records among the lines of a log. A line cut off by a killed process is left out."""
    records = []
    for line in lines:
        if line.startswith(MARK):
            try:
                records.append(json.loads(line[len(MARK) :]))
            except ValueError:
                print(f"not JSON, left out: {line[:80]}", file=sys.stderr)
    return records


def stamp() -> Record:
    """Where and from what the figures come."""
    now = datetime.now(UTC)
    gpu, _, driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(", ")
    return {
        "run": now.strftime("%Y%m%dT%H%M%SZ"),
        "date": now.isoformat(timespec="seconds"),
        "commit": os.environ.get("KVASIR_COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"),
        "machine": gpu,
        "driver": driver.partition("\n")[0],
    }


def append(records: Sequence[Record], stamped: Record, path: Path = RESULTS) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record | stamped) + "\n" for record in records)


def load(path: Path = RESULTS) -> list[Record]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# ---------------------------------------------------------------- the table


def table(records: Sequence[Record], vllm: Mapping[str, Any]) -> str:
    """The latest figure of each workload, in Markdown. A workload that was cut has no figure of vLLM's beside it."""
    lines = [
        f"| workload | model | requests | kernels | | Kvasir | runs | {vllm['engine']} | times vLLM's speed | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    records = _with_kernels(records)
    for record in _latest(records, "workload"):
        key, unit = figure(record["workload"])
        ours, theirs = record[key], vllm["workloads"].get(record["workload"], {}).get(key)
        ratio = None if theirs is None else theirs / ours if key == "ms_per_step" else ours / theirs
        cells = [record["workload"], record["model"], record["requests"], record["kernels"], unit, ours]
        cells += [len(record["times_s"]), theirs, ratio, record["commit"]]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += ["", *_startup_lines(records, vllm)]
    return "\n".join(lines)


def _startup_lines(records: Sequence[Record], vllm: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | kernels | import + construct, s | process start to first token, s | vLLM import + construct, s "
        "(caches empty / full) | logits: largest relative error | argmax the same | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    starts = [record for record in records if record.get("kind") == "startup"]
    for record in _latest(starts, "model"):
        theirs, logits = vllm["startup"][record["model"]], record["logits"]
        their_starts = [theirs["import_s"] + theirs[key] for key in ("construct_s", "construct_warm_s")]
        error = f"{logits['max_relative_error']:.2g}{'' if logits['ok'] else ' **TOO MUCH**'}"
        cells = [
            record["model"],
            record["kernels"],
            record["import_s"] + record["construct_s"],
            record["start_to_first_token_s"],
            " / ".join(f"{seconds:.1f}" for seconds in their_starts),
            error,
            f"{logits['same_argmax']:.0%}",
            record["commit"],
        ]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return lines if starts else []


def _with_kernels(records: Sequence[Record]) -> list[Record]:
    """Each record with the kernels it was measured with, which the start of its run has noted."""
    noted = {(start["run"], start["model"]): start["kernels"] for start in records if start.get("kind") == "startup"}
    return [record | {"kernels": noted.get((record["run"], record.get("model")))} for record in records]


def _latest(records: Sequence[Record], key: str) -> list[Record]:
    """The last record of each value of `key` and each kind of kernels, as they first came; failed ones do not count."""
    found: dict[tuple[str, str | None], Record] = {}
    for record in records:
        if key in record and "skipped" not in record:
            found[record[key], record["kernels"]] = record
    return list(found.values())


def figure(workload: str) -> tuple[str, str]:
    """Which figure tells most about a workload, and its unit."""
    if "decode" in workload:
        return "ms_per_step", "ms/step"
    return ("total_tok_s", "in+out tok/s") if workload.startswith("prefill") else ("out_tok_s", "out tok/s")


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--add", type=Path, metavar="FILE", help="a results.jsonl of another machine")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.add:
        append(load(arguments.add), {}, arguments.results)
    stamped = stamp() if arguments.logs else {}
    for log in arguments.logs:
        append(read_results(log.read_text(encoding="utf-8", errors="replace").splitlines()), stamped, arguments.results)
    print(table(load(arguments.results), json.loads(VLLM.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
