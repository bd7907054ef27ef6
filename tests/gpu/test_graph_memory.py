"""Graphs and the memory they take: measured, refused and dropped, the text is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvasir import LLM, SamplingParams
from tests.gpu.test_engine import make, run
from tests.model_builders import make_hf_model, save

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        make_hf_model("qwen3", hidden_size=64, num_attention_heads=4, head_dim=16), tmp_path_factory.mktemp("m")
    )


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.client.core  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    with make(path, enforce_eager=True) as llm:
        return run(llm, GREEDY)


def test_what_graphs_take_is_measured(path: Path, wanted: list[list[int]]) -> None:
    with make(path) as llm:
        core = core_of(llm)
        memory = core.memory
        assert memory.largest_step > 0 and memory.outside > 0 and memory.graphs_expected > 0 == memory.graphs
        assert run(llm, GREEDY) == wanted
        stats, pool = core.stats(), core.executor.runner.graphs.cache.pool
        assert stats.num_graphs > 2 and stats.graph_bytes == pool.memory.taken > 0
        assert 0 <= pool.memory.idle <= pool.memory.taken
        assert stats.graphs_deferred == stats.graphs_dropped == 0


def test_without_memory_for_graphs_the_same_steps_run_without(path: Path, wanted: list[list[int]]) -> None:
    with make(path) as llm:
        core = core_of(llm)
        core.executor.runner.graphs.cache.pool.memory.kept_free = 1 << 60
        assert run(llm, GREEDY) == wanted
        stats = core.stats()
        assert stats.graphs_deferred > 1 and stats.num_graphs == stats.preemptions == 0


def test_a_capture_that_fails_leaves_the_device_as_it_was(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the recording, every other time."""
    from kvasir.worker.graphs import pool

    record, tries = pool.GraphPool._record, []

    def failing(self: Any, call: Any) -> Any:
        tries.append(1)
        calls = []

        def breaks() -> Any:
            calls.append(call())
            raise RuntimeError("Triton Error [CUDA]: out of memory")

        return record(self, breaks if len(tries) % 2 else call)

    monkeypatch.setattr(pool.GraphPool, "_record", failing)
    with make(path) as llm:
        assert run(llm, GREEDY) == wanted
        stats = core_of(llm).stats()
        assert stats.graphs_deferred > 1 and stats.num_graphs > 0 and stats.preemptions == 0


def test_graphs_that_make_way_for_others(path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvasir.worker.graphs import cache

    monkeypatch.setattr(cache, "MAX_GRAPHS", 2)
    with make(path) as llm:
        assert run(llm, GREEDY) == wanted
        stats = core_of(llm).stats()
        assert stats.graphs_dropped > 0 and stats.num_graphs <= 2


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 1024}, {"max_num_seqs": 1}], ids=str)
def test_budgets_that_fit_a_graph(path: Path, wanted: list[list[int]], settings: dict[str, int]) -> None:
    with make(path, **settings) as llm:
        assert run(llm, GREEDY) == wanted
