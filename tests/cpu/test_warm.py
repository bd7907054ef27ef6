"""`kvasir warm`: a start without a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir import LLM
from kvasir.entrypoints.cli.main import main
from tests.model_builders import make_hf_model, save


def test_an_engine_starts_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(make_hf_model("qwen3", num_hidden_layers=1), tmp_path)
    flags = ["--device", "cpu", "--max-model-len", "64", "--kv-cache-memory-bytes", "8M", "--skip-tokenizer-init"]
    assert main(["warm", str(path), *flags]) == 0
    assert "nothing is compiled on this device" in capsys.readouterr().out


def test_wrong_settings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_target_for_steps_is_kept_on_a_cpu(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen3", num_hidden_layers=1), tmp_path)
    settings = {"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
    with LLM(str(path), target_step_ms=1e-3, use_tqdm_on_load=False, **settings) as llm:
        budget = llm.llm_engine.client.core.scheduler.step_budget  # type: ignore[attr-defined]
        assert budget is not None and budget.small == 64, "the smallest chunk takes longer than a microsecond"
    with LLM(str(path), use_tqdm_on_load=False, **settings) as llm:
        assert llm.llm_engine.client.core.scheduler.step_budget is None  # type: ignore[attr-defined]
