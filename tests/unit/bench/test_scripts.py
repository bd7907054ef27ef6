"""The scripts under benchmarks/ that need no device: host overhead, the record of GPU runs, the reading of traces."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent.parent / "benchmarks"


@pytest.fixture
def host_overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("host_overhead")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "h200"))
    return import_module("record")


@pytest.fixture
def step_trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "h200"))
    return import_module("step_trace")


# ---------------------------------------------------------------- host overhead


@pytest.mark.parametrize("stream", [False, True])
def test_every_row_decodes_in_every_step(host_overhead: ModuleType, stream: bool) -> None:
    figure = host_overhead.measure(5, 16, stream, 40)  # asserts it itself
    assert (figure.running, figure.block_size, figure.stream) == (5, 16, stream)
    assert 0 < figure.median_us <= figure.p99_us


def test_conditions_of_host_overhead(host_overhead: ModuleType) -> None:
    def conditions(small: float, large: float) -> list[bool]:
        figures = [
            host_overhead.Figure(running, block_size, stream, value, value, value)
            for block_size in (16, 64)
            for stream in (False, True)
            for running, value in ((1, small), (64, small), (256, large), (1024, large))
        ]
        return [holds for _, holds in host_overhead.conditions(figures)]

    assert conditions(80, 150) == [True, True] * 4
    assert conditions(80, 180) == [True, False] * 4  # 0.104 us for each of 960 rows
    assert conditions(215, 310) == [False, True] * 4


# ---------------------------------------------------------------- the process boundary


def test_the_process_boundary_is_measured(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "process_boundary.py"),
        "--running",
        "8",
        "--steps",
        "20",
        "--rounds",
        "1",
    ]
    subprocess.run([*command, "--json", str(tmp_path / "figures.json")], check=True, capture_output=True, timeout=600)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [figure["device_ms"] for figure in figures] == [0.0, 2.0]
    for figure in figures:
        assert figure["running"] == 8 and figure["bare_step_us"] > 0 and 0 < figure["step_us"] < figure["turn_us"]
        assert 0 < figure["latency_us"] <= figure["latency_p99_us"] and figure["decode_us"] > 0


# ---------------------------------------------------------------- policies in simulated time


def run_script(name: str, *arguments: object) -> list[str]:
    """The lines that a script under benchmarks/ prints."""
    command = [sys.executable, str(BENCHMARKS / name), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.splitlines()


def test_policies_are_compared(tmp_path: Path) -> None:
    trace, figures = tmp_path / "trace.csv", tmp_path / "figures.json"
    jobs = [f"2023-11-16 18:15:{i:02}.0000000,{300 + 20 * i},{30 + i}" for i in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *jobs]))
    small = ["--requests", 24, "--loads", "1,4", "--blocks", 256, "--few-blocks", 80]
    shown = run_script("scheduling.py", "--trace", trace, *small, "--json", figures)
    assert shown[0].startswith("24 requests of trace.csv; the device serves ")
    found = json.loads(figures.read_text())
    policies = ["fcfs", "fcfs, at most 256 wait", "priority", "priority, aging 50 s", "wrr"]
    rows = found["latencies"]
    assert [(row["load"], row["policy"]) for row in rows] == [(load, name) for load in (1, 4) for name in policies]
    assert all(0 < row["TTFT p50"] <= row["p99"] <= row["p99 "] for row in rows), "the end comes after the beginning"
    assert rows[0]["TTFT p50"] < rows[5]["TTFT p50"], "under four times the load everybody waits longer"
    assert [row["policy"][:8] for row in found["deadlines"]] == ["fcfs", "deadline", "deadline"] * 2
    assert all(0 <= row["in time %"] <= 100 for row in found["deadlines"])
    least, *_, most = found["watermarks"]
    assert least["preemptions"] > most["preemptions"], "what the watermark is for"
    for row in found["latencies"] + found["deadlines"]:
        assert any(line.split()[:2] == [str(row["load"]), row["policy"].split()[0]] for line in shown)
    assert sum(line[:1].isdigit() for line in shown[1:]) == 10 + 6 + 5, "a line for each"


# ---------------------------------------------------------------- the API process's ceiling


@pytest.mark.slow
def test_the_api_ceiling_is_measured(starter_model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    load = ["--clients", 1, 2, "--tokens", 20, "--step-ms", 0, "--seconds", 0.1]
    shown = run_script("api_ceiling.py", "--tokenizer", starter_model, *load, "--json", figures)
    assert "engine step 0 ms" in shown and shown[2].split()[:2] == ["clients", "tokens/s"]
    found = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [line.split()[0] for line in shown[3:]] == ["1", "2"] and [row["clients"] for row in found] == [1, 2]
    for row in found:
        assert row["rate"] > 0 and row["per_core"] > 0 and row["api_cpu"] > 0
        assert row["tokens_per_chunk"] >= 1, "every chunk has a token"


# ---------------------------------------------------------------- the record

STARTUP = {
    "kind": "startup", "model": "qwen3-0.6b", "import_s": 6.0, "construct_s": 3.0, "start_to_first_token_s": 9.5,
    "kernels": "own",
    "logits": {"max_relative_error": 0.0123, "same_argmax": 0.875, "ok": True},
}  # fmt: skip
NANO = {"workload": "nano_bench", "model": "qwen3-0.6b", "requests": 256, "out_tok_s": 46242.0, "total_tok_s": 90000.0}
NANO |= {"times_s": [3.0, 2.9, 3.1]}
DECODE = {"workload": "q_decode_b1", "model": "qwen3-0.6b", "requests": 1, "ms_per_step": 1.1436, "times_s": [1.0]}


def test_records_come_from_result_lines_alone(record: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "INFO something",
        "RESULT " + json.dumps(STARTUP),
        "RESULT {cut off",
        " RESULT {}",
        "RESULT " + json.dumps(NANO) + "\n",
    ]
    assert record.read_results(lines) == [STARTUP, NANO]
    assert "left out" in capsys.readouterr().err


def test_records_are_kept_with_their_stamp(record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_COMMIT", "abc123")
    stamped = record.stamp()
    assert stamped["commit"] == "abc123" and set(stamped) == {"run", "date", "commit", "machine", "driver"}
    file = tmp_path / "results.jsonl"
    assert record.load(file) == []
    record.append([STARTUP], stamped, file)
    record.append([NANO], stamped, file)
    assert record.load(file) == [STARTUP | stamped, NANO | stamped]


def test_the_table_stands_beside_vllm(record: ModuleType) -> None:
    vllm = json.loads(record.VLLM.read_text())
    earlier = NANO | {"out_tok_s": 1.0, "commit": "old"}
    cut = NANO | {"workload": "nano_bench[:16]", "requests": 16, "commit": "new"}
    skipped: dict[str, Any] = {"workload": "nano_bench_greedy", "skipped": "out of time", "commit": "new"}
    now = [STARTUP, earlier, NANO, DECODE, cut, skipped]
    lines = record.table([{"commit": "new", "run": "1"} | line for line in now], vllm).splitlines()
    assert lines[2:5] == [
        "| nano_bench | qwen3-0.6b | 256 | own | out tok/s | 46,242 | 3 | 23,121 | 2.00 | new |",
        "| q_decode_b1 | qwen3-0.6b | 1 | own | ms/step | 1.14 | 1 | 2.29 | 2.00 | new |",
        "| nano_bench[:16] | qwen3-0.6b | 16 | own | out tok/s | 46,242 | 3 | - | - | new |",
    ]
    assert lines[-1] == "| qwen3-0.6b | own | 9.00 | 9.50 | 60.0 / 28.6 | 0.012 | 88% | new |"


def test_figures_of_other_kernels_stand_apart(record: ModuleType) -> None:
    reference = [{"run": "1", "commit": "a"} | line for line in (STARTUP | {"kernels": "reference"}, NANO)]
    own = [{"run": "2", "commit": "a"} | line for line in (STARTUP, NANO | {"out_tok_s": 1.0})]
    lines = record.table(reference + own, json.loads(record.VLLM.read_text())).splitlines()
    assert ["| reference |" in lines[2], "| own |" in lines[3]] == [True, True]
    assert "| 46,242 |" in lines[2] and "| 1.00 |" in lines[3]
    assert "| reference |" in lines[-2] and "| own |" in lines[-1]


def test_too_large_an_error_is_said_aloud(record: ModuleType) -> None:
    wrong = STARTUP | {
        "logits": {"max_relative_error": 0.2, "same_argmax": 0.5, "ok": False},
        "run": "1",
        "commit": "a",
    }
    assert "0.2 **TOO MUCH**" in record.table([wrong], json.loads(record.VLLM.read_text()))


def test_the_table_of_nothing(record: ModuleType) -> None:
    assert record.table([], json.loads(record.VLLM.read_text())).startswith("| workload")


# ---------------------------------------------------------------- traces


def mark(phase: str, step: int, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"kvasir.{phase}#{step}", "ts": start, "dur": length}


def kernel(number: int, launched: float, start: float, length: float, cat: str = "kernel") -> list[dict[str, Any]]:
    args = {"correlation": number}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, "args": args},
        {"ph": "X", "cat": cat, "name": "k", "ts": start, "dur": length, "args": args},
    ]


def pipelined_trace(count: int = 6) -> list[dict[str, Any]]:
    """The host launches step N+1 while the device runs N; a step is two kernels and a copy, and 5 us to the next."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for n in range(count):
        host, device = 100.0 * n, 100.0 * n + 80
        events += [mark("schedule", n, host, 10), mark("execute", n, host + 10, 30), mark("sample", n, host + 40, 5)]
        events += [mark("wait", n - 1, host + 50, 20), mark("update", n - 1, host + 70, 15)]
        events += kernel(10 * n, host + 12, device, 40) + kernel(10 * n + 1, host + 20, device + 42, 50)
        events += kernel(10 * n + 2, host + 42, device + 92, 3, "gpu_memcpy")
    return events


def test_a_trace_of_steps_launched_ahead(step_trace: ModuleType) -> None:
    figures = step_trace.summarise(step_trace.read_steps(pipelined_trace()))
    assert figures["steps"] == 5
    assert figures["device_us"] == {"period": 100, "busy": 93, "gap": 5, "gap_p90": 5, "idle_within": 2}
    assert (figures["kernels"], figures["copies"]) == (2, 1)
    assert figures["host_us"] == {"schedule": 10, "execute": 30, "sample": 5, "wait": 20, "update": 15, "period": 100}
    assert figures["ahead"] == {
        "launched_before_result_was_read": 5,
        "of": 5,
        "launched_before_device_was_done": 5,
        "of_on_device": 5,
        "lead_us": 65,
    }
    text = step_trace.render(figures)
    assert "busy 0.093 ms (93%)" in text and "gap to the next 0.005 ms" in text and "5 of 5 steps" in text


def test_a_trace_without_a_device(step_trace: ModuleType) -> None:
    events = [event for event in pipelined_trace() if event.get("cat") == "user_annotation"]
    figures = step_trace.summarise(step_trace.read_steps(events))
    assert "device_us" not in figures and figures["host_us"]["execute"] == 30
    assert step_trace.render(figures).startswith("host ")


def test_kernels_launched_before_the_first_step_belong_to_none(step_trace: ModuleType) -> None:
    steps = step_trace.read_steps(pipelined_trace(2) + kernel(999, -50, 0, 10))
    assert [step.num_kernels for step in steps] == [2, 2]
