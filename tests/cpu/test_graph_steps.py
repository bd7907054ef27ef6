"""Whole steps as graphs would run them, without a GPU: the kernels in Triton's interpreter, replays by running again.

What only a GPU can show is left to tests/gpu: that nothing waits, and that what is captured may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.attention import select
from tests.model_builders import make_hf_model, save

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run for real here: see tests/gpu", allow_module_level=True)

from kvasir.kernels.triton import paged_decode, shared_prefix
from kvasir.worker import step_graphs
from kvasir.worker.graph_pool import Captured


class Repeats:
    """In place of a pool of graphs. A replay writes where the capture wrote, as a graph does."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, run: Callable[[], Any]) -> Captured[Any]:
        run()
        outputs = run()
        graph: Any = SimpleNamespace(replay=lambda: overwrite(outputs, run()))
        return Captured(graph, outputs)


def overwrite(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, tuple):
        for each, other in zip(old, new, strict=True):
            overwrite(each, other)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test run as graphs; what pays on a GPU only with many rows does here with few."""
    monkeypatch.setattr(step_graphs, "GraphPool", Repeats)
    monkeypatch.setitem(select._BACKENDS, "torch", select._BACKENDS["triton"])
    monkeypatch.setattr(paged_decode, "order_pays", lambda sequences: sequences >= 2)
    monkeypatch.setattr(paged_decode, "choose_split", lambda sequences, kv_heads: paged_decode.Split(2, 32))
    monkeypatch.setattr(shared_prefix, "pays", lambda sequences, prefix: prefix >= 16 and sequences >= 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hf_model("qwen3", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def some_requests(shared: int) -> tuple[list[Any], list[SamplingParams]]:
    rng = np.random.default_rng(shared)
    stem = rng.integers(2, 96, shared).tolist()
    lengths, answers = rng.integers(1, 12, 5), [2, 3, 5, 6, 7]  # one after the other ends
    prompts = [{"prompt_token_ids": stem + rng.integers(2, 96, int(n)).tolist()} for n in lengths]
    return prompts, [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in answers]


def answers_of(path: Path, shared: int) -> tuple[list[list[int]], Any]:
    prompts, params = some_requests(shared)
    settings = {"max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 16}
    settings |= {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings) as llm:
        said = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        return said, llm.llm_engine.client.core.executor.runner.graphs  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", [0, 16])
def test_steps_as_graphs_say_what_plain_steps_say(path: Path, shared: int, request: pytest.FixtureRequest) -> None:
    wanted, none = answers_of(path, shared)
    assert none is None, "the CPU's own backend runs without graphs"
    request.getfixturevalue("graphs")
    found, taken = answers_of(path, shared)
    assert found == wanted
    stats = taken.stats
    assert stats.mixed_steps > 0 and stats.ordered_steps > 0 and stats.replays > stats.mixed_steps
    assert (stats.shared_prefix_steps > 0) == (shared > 0)
    sizes = {shape.rows for shape in taken._forwards if not shape.is_mixed}
    assert len(sizes) > 2, "the batch was to shrink through several graphs"


def test_rehearsing_what_is_captured_changes_nothing(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = answers_of(path, 16)
    rehearsals = []

    @contextmanager
    def rehearsal() -> Iterator[None]:
        rehearsals.append(1)
        yield

    monkeypatch.setattr(step_graphs.kernels, "are_compiled", lambda device: device.type == "cpu")
    monkeypatch.setattr(step_graphs.kernels, "rehearsal", rehearsal)
    found, taken = answers_of(path, 16)
    assert found == wanted
    assert len(rehearsals) >= len(taken._forwards) > 2


def test_a_shortened_model_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    path = save(make_hf_model("gemma2", num_hidden_layers=4), tmp_path)
    with LLM(
        str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, dtype="float32", device="cpu", max_model_len=64,
        attention_backend="torch", kv_cache_memory_bytes=8 << 20,
    ) as llm:  # fmt: skip
        model = llm.llm_engine.client.core.executor.model  # type: ignore[attr-defined]
        short = model.shortened()
        assert {layer.attention.window for layer in short.layers} == {layer.attention.window for layer in model.layers}
        assert (len(short.layers), len(model.layers)) == (2, 4)
