"""Host memory behind the KV cache, with real models: the text does not depend on whether blocks came back or were
computed again, and the counters say which it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import SamplingParams
from kvasir.messages import KVSpec
from kvasir.worker.memory import KVMemory, PlainMemory, runs, staging_bytes
from tests.engine_builders import Model, generate, metric, tokens
from tests.pairwise import each_once

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
ROOM = {"swap_space": 0.01, "preemption_mode": "swap"}
WAYS: dict[str, dict[str, Any]] = {
    "swap": ROOM,
    "swap without prefix caching": {**ROOM, "enable_prefix_caching": False},
    "swap one step ahead": {**ROOM, "async_scheduling": True},
    "recompute": {"swap_space": 0.01, "preemption_mode": "recompute"},
    "measured": {"swap_space": 0.01},
    "offload": {"kv_offloading_size": 0.01},
    "both, with little room": {**ROOM, "swap_space": 0.0002, "kv_offloading_size": 0.0002},
}


MODELS = ["qwen3", "gemma3", "deepseek_v3", "gpt_oss"]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[list[int]]:
    return [model.greedy(prompt) for prompt in model.prompts[:10]]


@pytest.mark.parametrize(("way", "model"), each_once(list(WAYS), MODELS), indirect=["model"])
def test_the_text_is_transformers(model: Model, wanted: list[list[int]], way: str) -> None:
    with model.llm(**model.tight(), **WAYS[way]) as llm:
        assert tokens(generate(llm, model.prompts[:10], GREEDY)) == wanted
        assert metric(llm, "num_preemptions") > 0
        swapped, out, back = (
            metric(llm, name) for name in ("num_preemptions_swapped", "kv_blocks_swapped_out", "kv_blocks_swapped_in")
        )
        if way.startswith("swap"):
            assert swapped == metric(llm, "num_preemptions") and out > 0 and back > 0
            assert metric(llm, "recomputed_tokens") == 0
        if way in ("recompute", "offload"):
            assert swapped == out == back == 0
        if way == "recompute":
            assert metric(llm, "recomputed_tokens") > 0
        if way == "offload":
            assert metric(llm, "kv_blocks_offloaded") > 0 and metric(llm, "host_cache_blocks_cached") > 0
            again = generate(llm, model.prompts[:10], GREEDY)
            assert tokens(again) == wanted and metric(llm, "host_cache_hits") > 0
        assert metric(llm, "kv_cache_blocks_used") == metric(llm, "host_cache_blocks_used") == 0
        assert llm.reset_prefix_cache() and metric(llm, "host_cache_blocks_cached") == 0


@pytest.mark.parametrize(("caching", "model"), each_once([False, True], MODELS), indirect=["model"])
def test_branches_and_beams_survive_being_swapped(model: Model, caching: bool) -> None:
    params = [
        SamplingParams(n=4, seed=1, max_tokens=24, ignore_eos=True),
        SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=12, ignore_eos=True),
        GREEDY,
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=1, presence_penalty=0.5),
    ]
    prompts = [{"prompt_token_ids": prompt[:16]} for prompt in model.prompts[:8]]
    said = []
    for settings in ({"num_gpu_blocks_override": 600}, ROOM):
        tight = {**model.tight(), "enable_prefix_caching": caching, **settings}
        with model.llm(**tight) as llm:
            outputs = llm.generate(prompts, [params[i % 4] for i in range(8)], use_tqdm=False)
            said.append([[branch.token_ids for branch in output.outputs] for output in outputs])
            preempted = metric(llm, "num_preemptions_swapped")
            assert metric(llm, "kv_cache_blocks_used") == metric(llm, "host_cache_blocks_used") == 0
    assert said[0] == said[1]
    assert preempted > 0


@pytest.mark.slow
def test_two_ranks_copy_their_own_shares(tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    with model.llm(**model.tight(), **ROOM, tensor_parallel_size=2, async_scheduling=True) as llm:
        assert tokens(generate(llm, model.prompts[:10], GREEDY)) == [model.greedy(p) for p in model.prompts[:10]]
        assert metric(llm, "kv_blocks_swapped_in") > 0


@pytest.mark.slow
def test_each_of_two_ranks_measures_its_copies(tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    with model.llm(**model.tight(), swap_space=0.01, tensor_parallel_size=2) as llm:
        assert len(generate(llm, model.prompts[:2], GREEDY)) == 2


def test_blocks_go_to_the_host_and_back_as_they_are() -> None:
    memory = KVMemory(KVSpec(num_layers=3, block_size=4, page_bytes=24), 8, torch.device("cpu"))
    memory.pool[:] = torch.randint(0, 256, memory.pool.shape, dtype=torch.uint8)
    before = memory.pool.clone()
    host = PlainMemory(memory, 6)
    out = np.array([2, 3, 5], np.int32)
    host.exchange(out, out[:0], torch.tensor([7, 1, 4], dtype=torch.int32), torch.tensor([], dtype=torch.int32))
    # in one call, what leaves is copied before anything arrives
    back = np.array([1, 3, 5], np.int32)
    host.exchange(out[:1] - 1, back, torch.tensor([6]), torch.tensor([1, 6, 2]))
    wanted = before.clone()
    wanted[:, [1, 6, 2]] = before[:, [6, 1, 4]]
    assert torch.equal(memory.pool, wanted)


def test_neighbours_travel_together() -> None:
    def found(*numbers: int) -> list[tuple[int, int, int]]:
        return list(runs(np.array(numbers, np.int32)))

    assert found() == []
    assert found(3) == [(0, 3, 1)]
    assert found(1, 2, 3, 7, 9, 10) == [(0, 1, 3), (3, 7, 1), (4, 9, 2)]


def test_staging_is_a_small_part_of_the_cache() -> None:
    for pool, block in ((100 << 30, 8 << 20), (2 << 30, 1 << 20), (2 << 30, 64 << 20)):
        assert staging_bytes(pool, block) <= max(pool // 32, 8 * block)
