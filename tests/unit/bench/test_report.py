"""What is printed of a measurement, and what stands with it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvasir.bench import latency, report, throughput
from kvasir.bench.runners import Runner, alternate, paired_ratio, timed
from kvasir.bench.workloads import BenchRequest
from kvasir.errors import ConfigError

CONDITIONS = {
    "model": "some-model", "hardware": "a machine, 2 cores", "threads": 2, "dtype": "float32", "torch": "2.13.0",
    "kvasir": "0.1.0", "commit": "abc123", "seed": 0,
}  # fmt: skip


class FakeRunner:
    """Answers at once, with as many tokens as it is told to leave out."""

    name = "fake"

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.calls: list[str] = []

    def clear_cache(self) -> None:
        self.calls.append("clear_cache")

    def generate(self, requests: Any) -> list[list[int]]:
        self.calls.append("generate")
        return [[7] * (request.max_tokens - self.missing) for request in requests]


def test_throughput_table() -> None:
    figures = {"seconds": 10.0, "out_tok_s": 200.0, "total_tok_s": 600.0, "other_load": [0.01, 0.03]}
    record = {
        **CONDITIONS, "workload": "mixed:32", "requests": 32, "in_tokens": 4000, "out_tokens": 2000, "repeat": 2,
        "results": {
            "kvasir": {**figures, "steps": 130, "prefix_hits": 0, "preemptions": 1},
            "transformers": {**figures, "seconds": 25.0, "version": "5.0", "batch_size": 32, "padded_tokens": 12000},
        },
        "comparison": {"speed_ratio": {"median": 2.5, "min": 2.4, "max": 2.6}, "requests_with_same_tokens": 31},
    }  # fmt: skip
    assert throughput.render(record).splitlines() == [
        "some-model: mixed:32 (seed 0), 32 requests, 4,000 tokens in, 2,000 out",
        "a machine, 2 cores, 2 threads, float32, torch 2.13.0, kvasir 0.1.0 (abc123)",
        "",
        "              seconds  out tok/s  in+out tok/s  steps  prefix hits  preemptions  other load",
        "kvasir          10.00      200.0         600.0    130            0            1          2%",
        "transformers    25.00      200.0         600.0      -            -            -          2%",
        "",
        "kvasir / transformers: 2.50x (2.40 to 2.60 over 2 rounds)",
        "transformers 5.0: static batches of 32, 12,000 tokens with padding",
        "the same tokens for 31 of 32 requests",
    ]


def test_latency_table() -> None:
    figures = {
        "ttft_ms": 120.0,
        "ms_per_token": 50.0,
        "out_tok_s": 20.0,
        "all_ms_per_token": [49.0, 50.0],
        "other_load": [None],
    }
    record = {
        **CONDITIONS, "commit": None, "batch_size": 1, "input_len": 128, "output_len": 64, "num_iters": 2,
        "results": {"kvasir": figures},
    }  # fmt: skip
    assert latency.render(record).splitlines() == [
        "some-model: 1 x 128 in, 64 out, median of 2 (seed 0)",
        "a machine, 2 cores, 2 threads, float32, torch 2.13.0, kvasir 0.1.0 (no checkout)",
        "",
        "        TTFT ms  ms/token    min    max  decode tok/s  other load",
        "kvasir    120.0     50.00  49.00  50.00         20.00           -",
    ]


def test_a_runner_is_timed_as_if_for_the_first_time() -> None:
    runner = FakeRunner()
    result = timed(runner, [BenchRequest([1], 3)])
    assert runner.calls == ["clear_cache", "generate"] and result.tokens == [[7, 7, 7]] and result.seconds > 0


def test_a_runner_that_stops_early_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="fake must run every request to its max_tokens"):
        timed(FakeRunner(missing=1), [BenchRequest([1], 3)])


def test_runners_take_turns() -> None:
    one, other = FakeRunner(), FakeRunner()
    order: list[tuple[Runner, int]] = []
    alternate([one, other], 3, lambda runner, round: order.append((runner, round)))
    assert order == [(one, 0), (other, 0), (other, 1), (one, 1), (one, 2), (other, 2)]


def test_ratios_are_those_of_neighbours() -> None:
    assert paired_ratio([4.0, 9.0, 10.0], [2.0, 3.0, 2.0]) == {"median": 3.0, "min": 2.0, "max": 5.0}


def test_latency_needs_two_tokens() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        latency.LatencyOptions(output_len=1)


def test_the_cpu_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
        "processor\t: 1\nmodel name\t: AMD EPYC\n"
    )
    assert report.cpu_name(str(file)) == "AMD EPYC (family 25 model 17)"
    file.write_text("Hardware : none of it\n")
    assert report.cpu_name(str(file))
    assert report.cpu_name(str(tmp_path / "absent"))


def test_the_commit_is_named_with_a_plus_if_files_were_changed(tmp_path: Path) -> None:
    assert report.commit(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    try:
        git("init")
    except OSError:
        pytest.skip("there is no git")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = report.commit(tmp_path)
    assert clean is not None and len(clean) == 10
    (tmp_path / "file").write_text("2")
    assert report.commit(tmp_path) == clean + "+"


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json"):
        report.write_json(str(tmp_path / "no" / "such"), {})
