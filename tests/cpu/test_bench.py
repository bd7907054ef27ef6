"""Benchmarks end to end on a tiny random model; the same requests give the same tokens in Kvasir and transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvasir import LLM
from kvasir.bench import throughput
from kvasir.bench.runners import KvasirRunner, TransformersRunner
from kvasir.bench.workloads import Span, uniform
from kvasir.entrypoints.cli.main import main

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SETTINGS = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 4_000_000, "max_num_seqs": 8}
FLAGS = ["--dtype", "float32", "--device", "cpu", "--kv-cache-memory-bytes", "4m", "--max-num-seqs", "8"]
CONDITIONS = {
    "benchmark", "model", "dtype", "device", "hardware", "threads", "attention_backend", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "kvasir", "torch", "python", "commit", "date", "seed", "results",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    script(BENCHMARKS, "make_model").write_model("tiny", directory)
    return directory


def script(directory: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(directory))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(directory))


def run(arguments: list[str], file: Path) -> dict[str, Any]:
    assert main(["bench", *arguments, *FLAGS, "--json", str(file)]) == 0
    record: dict[str, Any] = json.loads(file.read_text())
    return record


# ---------------------------------------------------------------- kvasir bench


def test_embed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--runner", "pooling", "--num-prompts", "9", "--input-len", "3:40", "--repeat", "2"]
    record = run(["embed", str(model), *flags], tmp_path / "out.json")
    assert record["benchmark"] == "embed" and record["num_prompts"] == 9 and record["repeat"] == 2
    assert record["texts_per_second"] == pytest.approx(9 / record["seconds"]) and record["one_text_ms"] > 0
    assert record["tokens_per_second"] == pytest.approx(record["prompt_tokens"] / record["seconds"])
    assert "9 texts of 3:40 tokens" in capsys.readouterr().out
    assert main(["bench", "embed", str(model), *FLAGS]) != 0
    assert "needs a pooling model" in capsys.readouterr().err


def test_throughput_beside_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "12", "--input-len", "3:60", "--output-len", "2:20", "--repeat", "2"]
    record = run(["throughput", str(model), *flags, "--compare", "transformers"], tmp_path / "out.json")
    sizes = {"workload", "requests", "in_tokens", "out_tokens", "repeat"}
    assert set(record) == CONDITIONS | sizes | {"comparison"}
    figures = {"seconds", "out_tok_s", "total_tok_s", "out_tokens", "all_seconds", "other_load"}
    ours, theirs = record["results"]["kvasir"], record["results"]["transformers"]
    assert set(ours) == figures | {"steps", "prefix_hits", "preemptions"}
    assert set(theirs) == figures | {"version", "batch_size", "padded_tokens"}
    assert ours["out_tokens"] == theirs["out_tokens"] == record["out_tokens"]
    assert len(ours["all_seconds"]) == len(theirs["all_seconds"]) == 2
    assert record["comparison"]["requests_with_same_tokens"] == record["requests"] == 12
    assert theirs["batch_size"] == 8  # max_num_seqs
    assert ours["prefix_hits"] == 0, "a repeated workload must not find its own blocks"
    assert capsys.readouterr().out == throughput.render(record) + "\n"


def test_latency_beside_transformers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input-len", "9", "--output-len", "4", "--batch-size", "2", "--num-iters", "2", "--seed", "5"]
    record = run(["latency", str(model), *flags, "--compare", "transformers"], tmp_path / "out.json")
    assert set(record) == CONDITIONS | {"input_len", "output_len", "batch_size", "num_iters", "comparison"}
    for result in record["results"].values():
        assert set(result) == {"ttft_ms", "ms_per_token", "out_tok_s", "all_ttft_ms", "all_ms_per_token", "other_load"}
        assert len(result["all_ttft_ms"]) == 2 and result["ttft_ms"] > 0
    assert "ms/token, transformers / kvasir" in capsys.readouterr().out


def test_a_workload_file_and_dummy_weights(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}\n{"prompt_token_ids": [8], "max_tokens": 3}\n')
    record = run(["throughput", str(model), "--workload", str(file), "--load-format", "dummy"], tmp_path / "out.json")
    assert (record["requests"], record["in_tokens"], record["out_tokens"]) == (2, 4, 5)
    assert "comparison" not in record


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "mixed:4", "--num-prompts", "3"], "leave out --num-prompts"),
        (["--compare-batch", "4"], "--compare-batch needs --compare transformers"),
        (["--compare", "transformers", "--load-format", "dummy"], "benchmarks/make_model.py"),
        (["--compare", "transformers", "--hf-overrides", '{"rope_theta": 5.0}'], "--hf-overrides"),
        (["--input-len", "600", "--num-prompts", "1"], "512"),
        (["--workload", "nothing.jsonl"], "cannot be read"),
        (["--json", "no/such/file"], "directory does not exist"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", str(model), *FLAGS, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_every_request_gets_the_same_tokens(model: Path, batch_size: int) -> None:
    requests = uniform(7, Span(1, 40), Span(1, 16), 512, seed=batch_size)
    with LLM(str(model), skip_tokenizer_init=True, **SETTINGS) as llm:
        ours = KvasirRunner(llm).generate(requests)
        theirs = TransformersRunner(llm.llm_engine.config, batch_size).generate(requests)
    assert ours == theirs
    assert [len(tokens) for tokens in ours] == [request.max_tokens for request in requests]


def test_the_same_seed_gives_the_same_model(model: Path, tmp_path: Path) -> None:
    script(BENCHMARKS, "make_model").write_model("tiny", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- benchmarks/h200, on a CPU


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), skip_tokenizer_init=True, **SETTINGS) as llm:
        yield llm


def test_the_engines_logits_are_checked(llm: LLM) -> None:
    found = script(BENCHMARKS / "h200", "logits").check(llm)
    assert found["ok"] and found["max_relative_error"] < 1e-5 and found["same_argmax"] == 1.0
    assert (found["prompts"], found["positions"]) == (8, 32)


def test_wrong_logits_are_noticed(llm: LLM) -> None:
    logits = script(BENCHMARKS / "h200", "logits")
    attention = logits._runner(llm).model.layers[1].attention
    backend = attention.backend

    class Forgetful:
        """Loses the oldest token of every sequence."""

        def forward(self, *tensors: torch.Tensor, window: int | None, **options: Any) -> torch.Tensor:
            result: torch.Tensor = backend.forward(*tensors, window=8, **options)
            return result

    attention.backend = Forgetful()
    found = logits.check(llm)
    assert not found["ok"] and found["max_relative_error"] > found["tolerance"]


WORKLOADS = """
import json, os
MODELS = {"qwen3-0.6b": json.load(open(os.environ["TINY_CONFIG"]))}
def write_model_dir(name, root):
    os.makedirs(os.path.join(root, name), exist_ok=True)
    with open(os.path.join(root, name, "config.json"), "w") as file:
        json.dump(MODELS[name], file)
    return os.path.join(root, name)
def workload(name, count):
    return dict(name=name, model="qwen3-0.6b", prompts=[[5 + i] * 20 for i in range(count)], max_tokens=[6] * count,
                temperature=0.0, reps=1, warm=1, prefix_cache="cold")
def all_workloads():
    return [workload("nano_bench_greedy", 6), workload("q_decode_b1", 1)]
"""


@pytest.mark.slow
def test_the_peers_measure_runs_the_adapter(model: Path, tmp_path: Path) -> None:
    """measure.py as it is, over a tiny model under a name it knows; then the record and the profile."""
    measure = Path(os.environ.get("KVASIR_TEST_DATA") or "nowhere").parent / "peers" / "vllm_h200" / "measure.py"
    if not measure.is_file():
        pytest.skip(f"there is no {measure}")
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "workloads.py").write_text(WORKLOADS)
    shutil.copy(measure, peers)
    settings = SETTINGS | {"max_num_batched_tokens": 64}
    environment = os.environ | {
        "KVASIR_PEERS": str(peers),
        "KVASIR_BENCH_SETTINGS": json.dumps(settings),
        "KVASIR_COMMIT": "abc123",
        "TINY_CONFIG": str(model / "config.json"),
        "MODEL_ROOT": str(tmp_path / "models"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(BENCHMARKS / "h200" / "run.py"),
        "--models",
        "qwen3-0.6b",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--profile", "--profile-steps", "12", "--max-model-len", "512", "--", "--reps", "1"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [record.get("workload", "startup") for record in records] == ["startup", "nano_bench_greedy", "q_decode_b1"]
    assert records[0]["logits"]["ok"] and records[0]["commit"] == "abc123"
    assert records[2]["ms_per_step"] > 0
    assert "| nano_bench_greedy | qwen3-0.6b | 6 | own | out tok/s |" in ran.stdout
    profiles = [
        json.loads(line.removeprefix("PROFILE ")) for line in ran.stdout.splitlines() if line.startswith("PROFILE ")
    ]
    assert [(profile["workload"], profile["running"]) for profile in profiles] == [
        ("nano_bench_greedy", 6),
        ("q_decode_b1", 1),
    ]
    for profile in profiles:
        assert profile["steps"] == 12 and profile["ahead"]["of"] == 12
        assert all(profile["host_us"][phase] > 0 for phase in ("schedule", "execute", "sample", "wait", "update"))
