"""Heads that draft on a GPU: in graphs that wait for nothing, with the text of the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvasir import SamplingParams
from tests.draft_head_builders import Shape, TorchHead, TorchMedusa
from tests.gpu.test_engine import forbid_waiting, make, prompts, run
from tests.model_builders import make_hf_model, save

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked and tight": {
        "max_num_batched_tokens": 24,
        "max_num_seqs": 8,
        "block_size": 16,
        "num_gpu_blocks_override": 20,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    hf = make_hf_model("llama", hidden_size=64, num_attention_heads=4, head_dim=16)
    return hf, save(hf, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_text_stays_the_same(checkpoint: tuple[Any, Path], tmp_path: Path, method: str, way: str) -> None:
    hf, path = checkpoint
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with make(path) as llm:
        wanted = run(llm, params)
    if method == "medusa":
        drafting = {"model": TorchMedusa(hf, heads=3).save(tmp_path, by_authors=True)}
    else:
        shape = Shape(method, (3,) if method == "eagle" else (0, 1, 2), hidden=64, head_dim=16)
        head = TorchHead(shape, hf)
        head.learn([prompt + said for prompt, said in zip(prompts(), wanted, strict=True)][:8], 60)
        drafting = {"model": head.save(tmp_path)}
    settings = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **drafting}
    with make(path, speculative_config=settings, **WAYS[way]) as llm:
        forbid_waiting(llm)
        assert run(llm, params) == wanted
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        stats, graphs = core.stats(), core.executor.runner.graphs
        assert stats.late_compilations == stats.late_captures == 0
        assert stats.accepted_tokens > 20 * (method != "medusa")
        assert (graphs is None) == (way == "eager")
        assert graphs is None or graphs.stats.passes > 10
