"""Host memory behind a GPU's KV cache: content of the copies, equal text, no waiting, overlap. Run with -m gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import SamplingParams
from kvasir.messages import KVSpec
from kvasir.worker.memory import STAGES, KVMemory, PinnedMemory, make_host_memory
from tests.engine_builders import metric
from tests.gpu.test_engine import forbid_waiting, make, run
from tests.model_builders import make_hf_model, save

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
TIGHT = {"max_num_seqs": 8, "block_size": 16, "num_gpu_blocks_override": 17}
ROOM = {"swap_space": 0.05, "preemption_mode": "swap"}
WAYS: dict[str, dict[str, Any]] = {
    "swap": {**TIGHT, **ROOM},
    "swap without prefix caching": {**TIGHT, **ROOM, "enable_prefix_caching": False},
    "swap, not one step ahead": {**TIGHT, **ROOM, "async_scheduling": False},
    "swap, eager": {**TIGHT, **ROOM, "enforce_eager": True},
    "recompute": {**TIGHT, "swap_space": 0.05, "preemption_mode": "recompute"},
    "measured": {**TIGHT, "swap_space": 0.05},
    "offload": {**TIGHT, "kv_offloading_size": 0.05},
}


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = make_hf_model(request.param, hidden_size=64, num_attention_heads=4, head_dim=16)
    return save(hf, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    with make(path) as llm:
        return run(llm, GREEDY)


@pytest.mark.parametrize("way", WAYS)
def test_text_does_not_depend_on_where_blocks_wait(path: Path, wanted: list[list[int]], way: str) -> None:
    settings = dict(WAYS[way])
    with make(path) as llm:  # windows make several groups, each with blocks of its own
        groups = len(llm.llm_engine.client.core.executor.kv_spec().windows)  # type: ignore[attr-defined]
    settings["num_gpu_blocks_override"] = 16 * groups + 1
    with make(path, **settings) as llm:
        run(llm, GREEDY)  # compiles kernels, captures graphs
        llm.reset_prefix_cache()
        forbid_waiting(llm)
        assert run(llm, GREEDY) == wanted
        assert metric(llm, "num_preemptions") > 0
        if way.startswith("swap"):
            assert metric(llm, "kv_blocks_swapped_out") > 0 and metric(llm, "kv_blocks_swapped_in") > 0
            assert metric(llm, "num_preemptions_swapped") > 0
        if way == "recompute":
            assert metric(llm, "kv_blocks_swapped_out") == 0 and metric(llm, "recomputed_tokens") > 0
        if way == "offload":
            assert metric(llm, "kv_blocks_offloaded") > 0
            assert run(llm, GREEDY) == wanted and metric(llm, "kv_blocks_restored") > 0
        assert metric(llm, "kv_cache_blocks_used") == metric(llm, "host_cache_blocks_used") == 0


def on_device(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int32)).cuda()


def test_content_of_the_copies() -> None:
    """Random exchanges, several times as large as the staging buffers, against the same on the CPU; the device's
    blocks are written over right after each, as a step would."""
    rng = np.random.default_rng(0)
    spec = KVSpec(num_layers=5, block_size=16, page_bytes=4096 + 16)
    memory = KVMemory(spec, 200, torch.device("cuda"))
    host = make_host_memory(memory, 300)
    assert isinstance(host, PinnedMemory) and host.blocks.is_pinned()
    assert len(host._places) * STAGES < 40, "or staging is never used twice"
    pool, mirror = np.zeros((5, 200, 4112), np.uint8), np.zeros((300, 5, 4112), np.uint8)
    for turn in range(40):
        fresh = rng.integers(0, 256, pool.shape, np.uint8)
        memory.pool.copy_(torch.from_numpy(fresh).cuda())  # as the steps before would
        pool[:] = fresh
        out = np.sort(rng.choice(300, int(rng.integers(0, 60)), replace=False)).astype(np.int32)
        back = np.sort(rng.choice(300, int(rng.integers(0, 60)), replace=False)).astype(np.int32)
        if turn % 2:  # half the time nothing comes back that left in the same step
            back = np.setdiff1d(back, out).astype(np.int32)
        leaving, arriving = (rng.choice(200, len(side), replace=False) for side in (out, back))
        arguments = on_device(leaving), on_device(arriving)
        torch.cuda.set_sync_debug_mode("error")
        host.exchange(out, back, *arguments)
        torch.cuda.set_sync_debug_mode("default")
        after = memory.pool.clone()
        memory.pool.fill_(turn)  # the step writes
        mirror[out] = pool[:, leaving].swapaxes(0, 1)
        pool[:, arriving] = mirror[back].swapaxes(0, 1)
        assert np.array_equal(after.cpu().numpy(), pool)
    torch.cuda.synchronize()
    assert np.array_equal(host.blocks.numpy(), mirror)
    host.close()


def test_transfers_run_beside_the_step() -> None:
    """What leaves goes through a stream of its own: if that one is busy, the step's goes on."""
    spec = KVSpec(num_layers=32, block_size=64, page_bytes=256 << 10)  # blocks of 8 MiB
    memory = KVMemory(spec, 600, torch.device("cuda"))
    host = make_host_memory(memory, 64)
    assert isinstance(host, PinnedMemory)
    count = len(host._places) * STAGES  # what fits into staging
    out, none = np.arange(1, count + 1, dtype=np.int32), np.zeros(0, np.int32)
    leaving, arriving = on_device(out), on_device(none)
    host.exchange(out, none, leaving, arriving)  # compiles the kernel
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    with torch.cuda.stream(host._stream):
        torch.cuda._sleep(4_000_000_000)  # clock cycles: some two seconds
        busy.record()
    host.exchange(out, none, leaving, arriving)
    torch.cuda.current_stream().synchronize()
    assert not busy.query(), "the step waited for the copies"
    torch.cuda.synchronize()
    host.close()


def test_closing_gives_host_memory_back(path: Path) -> None:
    with make(path, swap_space=0.5, preemption_mode="swap") as llm:
        host = llm.llm_engine.client.core.executor.runner.host_memory  # type: ignore[attr-defined]
        assert host.blocks.is_pinned() and host.blocks.nbytes > 400 << 20
    assert len(host.blocks) == 0
