"""Runs every workload of every model on a GPU machine, appends the record, prints the table and gaps between steps.

    python benchmarks/h200/run.py [--models NAME,NAME] [--out DIRECTORY] [--tests] [--profile] [-- flags of measure.py]
    python benchmarks/h200/run.py --tests --models ""       only the GPU tests

Each model runs in a process of its own. Measurements from before a failure or a timeout are kept.
Without --out records go to benchmarks/h200/results.jsonl; with it they are written there, beside the logs, to be
appended later with record.py --add.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import record

HERE = Path(__file__).parent
TESTS = HERE.parent.parent / "tests"
# What is profiled of each model: all requests at once, and one alone.
PROFILED = {"qwen3-0.6b": "nano_bench_greedy,q_decode_b1", "llama-3.1-8b": "decode_b64,decode_b1"}


def main() -> int:
    arguments = _parse()
    logs = arguments.out or Path(tempfile.mkdtemp(prefix="kvasir-bench-"))
    logs.mkdir(parents=True, exist_ok=True)
    results = arguments.out / record.RESULTS.name if arguments.out else record.RESULTS
    stamped = record.stamp()
    failed = []
    if arguments.tests:
        command = ["-m", "pytest", "-q", "-m", "gpu", *map(str, gpu_tests())]
        _, status = run(command, logs / "tests.log", arguments.tests_timeout)
        failed += ["tests"] * (status != 0)
    for model in filter(None, arguments.models.split(",")):
        command = [str(HERE / "bench_kvasir.py"), "--model", model]
        command += ["--max-model-len", str(arguments.max_model_len), *arguments.rest]
        lines, status = run(command, logs / f"bench_{model}.log", arguments.timeout)
        record.append(record.read_results(lines), stamped, results)
        failed += [model] * (status != 0)
        if arguments.profile and model in PROFILED:
            command = [str(HERE / "profile_gaps.py"), "--model", model, "--workload", PROFILED[model]]
            command += ["--requests", str(arguments.profile_requests), "--steps", str(arguments.profile_steps)]
            command += ["--max-model-len", str(arguments.max_model_len)]
            _, status = run(command, logs / f"profile_{model}.log", arguments.timeout)
            failed += [f"profile of {model}"] * (status != 0)
    print("\n" + record.table(record.load(results), json.loads(record.VLLM.read_text(encoding="utf-8"))))
    if failed:
        print(f"\nFAILED: {', '.join(failed)}; see the logs in {logs}")
    return 1 if failed else 0


def gpu_tests() -> list[Path]:
    """What `pytest -m gpu` selects of all tests, file by file: to collect the others takes packages a GPU needs not."""
    kernels = [path for path in sorted((TESTS / "cpu").glob("test_*.py")) if "pytest.mark.kernel" in path.read_text()]
    return [*kernels, TESTS / "gpu"]


def run(command: Sequence[str], log: Path, timeout: float) -> tuple[list[str], int]:
    """Run a script, show what it prints and keep it; returns its lines and exit status, 124 if it took too long."""
    print(f"--- {' '.join(command)}", flush=True)
    lines = []
    try:
        with log.open("w", encoding="utf-8") as file:
            whole = ["timeout", "--kill-after=10", str(int(timeout)), sys.executable, "-u", *command]
            with subprocess.Popen(
                whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    file.write(line)
                    file.flush()
                    sys.stdout.write(line)
                    sys.stdout.flush()
            return lines, process.returncode
    except OSError as error:
        print(f"cannot run it: {error}")
        return lines, 127


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(PROFILED))
    parser.add_argument("--out", type=Path, metavar="DIRECTORY")
    parser.add_argument("--tests", action="store_true", help="first run the tests that `pytest -m gpu` selects")
    parser.add_argument("--tests-timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument("--profile", action="store_true", help="also profile the gaps between steps")
    parser.add_argument(
        "--profile-requests", type=int, default=0, metavar="N", help="profile only the first N requests"
    )
    parser.add_argument("--profile-steps", type=int, default=100, metavar="N")
    parser.add_argument("--max-model-len", type=int, default=4096, metavar="N")
    parser.add_argument("--timeout", type=float, default=550, metavar="SECONDS", help="for each process (default: 550)")
    own, rest = _split(sys.argv[1:])
    arguments = parser.parse_args(own)
    arguments.rest = rest
    return arguments


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
