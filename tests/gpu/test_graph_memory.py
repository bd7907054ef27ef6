"""Graphs and the memory they take: whether it is there or not, the text is the same."""

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
        assert memory.largest_step > 0 and memory.outside > 0
        assert 0 < memory.graphs <= memory.graphs_expected, "the cache was sized with too little for graphs"
        assert run(llm, GREEDY) == wanted
        stats, graphs = core.stats(), core.executor.runner.graphs
        assert stats.num_graphs == len(graphs.forwards) + len(graphs.heads) > 100
        assert stats.graph_bytes == graphs.pool.taken > 0
        assert stats.late_captures == stats.late_compilations == 0


def test_without_memory_for_graphs_the_same_steps_run_without(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvasir.worker import graph_memory

    monkeypatch.setattr(graph_memory, "SEGMENT", 1 << 60)
    with make(path) as llm:
        assert run(llm, GREEDY) == wanted
        stats = core_of(llm).stats()
        assert stats.num_graphs == stats.preemptions == 0


def test_a_capture_that_fails_leaves_the_device_as_it_was(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the recording of the fortieth."""
    from kvasir.worker import graph_memory

    record, tries = graph_memory.GraphPool._record, []

    def failing(self: Any, call: Any) -> Any:
        tries.append(1)
        calls = []

        def breaks() -> Any:
            calls.append(call())
            raise RuntimeError("Triton Error [CUDA]: out of memory")

        return record(self, breaks if len(tries) == 40 else call)

    monkeypatch.setattr(graph_memory.GraphPool, "_record", failing)
    with make(path) as llm:
        assert run(llm, GREEDY) == wanted
        stats = core_of(llm).stats()
        assert stats.num_graphs == 39 and stats.preemptions == 0


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 1024}, {"max_num_seqs": 1}, {"max_num_seqs": 8}, {"max_num_seqs": 2048}],
    ids=str,
)
def test_budgets_of_all_sizes(path: Path, wanted: list[list[int]], settings: dict[str, int]) -> None:
    with make(path, **settings) as llm:
        assert run(llm, GREEDY) == wanted
        stats = core_of(llm).stats()
        assert stats.num_graphs > 20 and stats.late_compilations == stats.late_captures == 0


def test_two_engines_share_a_device(path: Path, wanted: list[list[int]]) -> None:
    """Each has a small share of the memory, and its own graphs."""
    with make(path, gpu_memory_utilization=0.05) as first, make(path, gpu_memory_utilization=0.1) as second:
        for llm in (first, second, first):
            assert run(llm, GREEDY) == wanted
        assert core_of(first).stats().late_compilations == core_of(second).stats().late_compilations == 0


def test_a_second_start_compiles_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one wrote down what it needs, and nothing else runs before the graphs are captured."""
    from kvasir.worker.worker import Worker

    with make(path):
        pass
    ran: list[Any] = []
    monkeypatch.setattr("kvasir.worker.worker.steps_to_compile", lambda *sizes, **_: ran.append(sizes) or [])
    with make(path) as llm:
        assert run(llm, GREEDY) and not ran and isinstance(core_of(llm).executor, Worker)
        assert core_of(llm).stats().late_compilations == 0
