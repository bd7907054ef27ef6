"""Commands that load a model here: a tiny one, or the starter model where text matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir import LLM, SamplingParams
from kvasir.bench import startup as bench_startup
from kvasir.entrypoints.cli.main import main
from tests.model_builders import make_hf_model, save
from tests.pairwise import few

FLAGS = ["--device", "cpu", "--kv-cache-memory-bytes", "16m", "--max-model-len", "128", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hf_model("llama"), tmp_path_factory.mktemp("models") / "tiny")


def run_startup(tiny: Path, file: Path, *flags: str) -> dict[str, Any]:
    arguments = ["bench", "startup", str(tiny), *FLAGS, "--skip-tokenizer-init", "--no-use-tqdm-on-load"]
    assert main([*arguments, "--json", str(file), *flags]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("warm", few([0, 1], fast=[0]))
def test_phases_of_a_start_add_up(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: int) -> None:
    flags = ["--load-format", "dummy", "--num-iters-cold", "1", "--num-iters-warm", str(warm)]
    record = run_startup(tiny, tmp_path / "startup.json", *flags)
    wanted = ["interpreter", "imports", "settings", "torch and device", "tokenizer", "weights", "KV cache"]
    assert list(record["results"]) == ["cold", "warm"][: 1 + warm]
    for figures in record["results"].values():
        assert list(figures["phases"]) == [*wanted, "first token", "unaccounted"]
        assert sum(figures["phases"].values()) == pytest.approx(figures["total"], abs=1e-6)
        assert all(took >= 0 for name, took in figures["phases"].items() if name != "unaccounted")
        assert abs(figures["phases"]["unaccounted"]) < 0.3 * figures["total"]
    shown = capsys.readouterr().out
    assert "process start to first token" in shown and f"medians of 1 cold{', 1 warm' * warm} starts" in shown


@pytest.mark.slow
def test_a_start_that_fails_says_why(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-iters-cold", "1", "--num-iters-warm", "0", "--skip-tokenizer-init"]
    assert main(["bench", "startup", str(tiny), *FLAGS, *flags, "--num-gpu-blocks-override", "2"]) == 2
    assert "kvasir: error: --max-model-len=128 needs" in capsys.readouterr().err
    assert main(["bench", "startup", str(tiny), "--num-iters-cold", "0", "--num-iters-warm", "0"]) == 2


def test_caches_of_cold_starts_are_empty_and_of_warm_ones_are_theirs(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def start(settings: Any, caches: Path) -> dict[str, Any]:
        caches.mkdir(exist_ok=True)
        seen.append((caches.name, [file.name for file in caches.iterdir()]))
        (caches / "kernel").touch()
        return {
            "conditions": {},
            "load_format": "dummy",
            "total": 1.0,
            "phases": {},
            "next_tokens": 1.0,
            "other_load": None,
        }

    monkeypatch.setattr(bench_startup, "_once", start)
    args = bench_startup.EngineArgs(str(tiny))
    bench_startup.run(args, bench_startup.StartupOptions(2, 2))
    assert seen == [("caches-0", []), ("caches-1", []), ("caches-1", ["kernel"]), ("caches-1", ["kernel"])]
    seen.clear()
    bench_startup.run(args, bench_startup.StartupOptions(0, 1))
    assert [files for _, files in seen] == [[], ["kernel"]], "one start fills them, and does not count"


def test_complete_with_a_model(starter_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--no-use-tqdm-on-load"]
    asked = ["-q", "The capital of France is", "--max-tokens", "6", "--temperature", "0", "--stats"]
    assert main(["complete", str(starter_model), *flags, *asked]) == 0
    shown = capsys.readouterr()
    with LLM(str(starter_model), device="cpu", kv_cache_memory_bytes="16m", max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert shown.out == output.outputs[0].text + "\n" and "Paris" in shown.out
    assert "[5 tokens in, 6 out, " in shown.err
