"""What does not fit a device is refused at the start, with numbers and the settings to lower."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.errors import ConfigError, EngineError
from kvasir.models.native import LayerByLayer, NativeDecoder
from kvasir.models.transformer import Transformer
from kvasir.platforms.cpu import CpuPlatform
from kvasir.worker import worker
from tests.model_builders import make_hf_model, save

MIB = 1 << 20


def full(*args: Any, **settings: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hf_model("llama"), tmp_path_factory.mktemp("model"))


def make(path: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
    settings = {"dtype": "float32", "device": "cpu", **sizes, **settings}
    return LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings)


def test_a_largest_step_that_does_not_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on a GPU; the way there is the same."""

    def measured(self: worker.Worker) -> int:
        self._run_largest_step()
        return 1 << 20

    monkeypatch.setattr(worker.Worker, "available_kv_bytes", measured)
    make(path, max_num_batched_tokens=48, max_num_seqs=4).close()
    monkeypatch.setattr(worker.ModelRunner, "execute", full)
    with pytest.raises(ConfigError, match=r"^The largest step, of 48 tokens for 4 requests, does not fit beside") as it:
        make(path, max_num_batched_tokens=48, max_num_seqs=4)
    assert it.match(r": lower max_num_batched_tokens or max_num_seqs\.$")


@pytest.mark.parametrize(("drafts", "lines"), [(3, 16), (9, 40), (32, 64)])
def test_the_largest_step_samples_at_every_draft(
    path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int, lines: int
) -> None:
    """Logits of all lines may be the most memory of a step."""
    seen: list[int] = []
    logits = Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden))

    def measured(self: worker.Worker) -> int:
        self._run_largest_step()
        seen.append(-1)
        return 1 << 20

    monkeypatch.setattr(worker.Worker, "available_kv_bytes", measured)
    make(path, speculative_config={"method": "suffix", "num_speculative_tokens": drafts}).close()
    assert max(seen[: seen.index(-1)]) == lines


def test_a_step_may_run_out_of_memory_that_is_not_torchs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's code, here: the step is tried again, and other errors are as deadly as ever."""
    said = ["Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: an illegal memory access was encountered"]
    execute = worker.ModelRunner.execute

    def failing_once(self: worker.ModelRunner, plan: Any) -> None:
        if fails:
            raise RuntimeError(fails.pop())
        execute(self, plan)

    monkeypatch.setattr(worker.ModelRunner, "execute", failing_once)
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    with make(path) as llm:
        fails = said[:1]
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        assert not fails and len(output.outputs[0].token_ids) == 2
        fails = said[1:]
        with pytest.raises(EngineError, match="illegal memory access"):
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)


class MeasuredCpu(CpuPlatform):
    """A CPU that tells its memory as a GPU does: 100 MiB, of which weights and the largest step take what they do."""

    step = 40 * MIB
    free = 60 * MIB
    held = 0  # by other engines of this process

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.kind = "cuda"
        self.steps = 0
        self.own = 0  # what this engine holds; nothing before it has loaded its weights

    def memory_bytes(self) -> int | None:
        return 100 * MIB

    def memory_free(self) -> int | None:
        return self.free

    def memory_used(self) -> int:
        own, self.own = self.own, 30 * MIB
        return self.held + own

    def memory_peak(self) -> int:
        return self.held + self.step + 1  # weights of a byte

    def synchronize(self) -> None:
        self.steps += 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "select", MeasuredCpu)
    for kind in (NativeDecoder, LayerByLayer, Transformer):
        monkeypatch.setattr(kind, "weight_bytes", lambda model: 1)


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_the_largest_step_is_measured_whoever_sizes_the_cache(path: Path, measured: None, setting: str) -> None:
    with make(path, **{"kv_cache_memory_bytes": None, setting: MIB if setting.startswith("kv") else 9}) as llm:
        executor: Any = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
        assert executor.platform.steps == 1, "it is run once"
        memory = executor.memory()
        assert (memory.largest_step, memory.outside) == (40 * MIB, 10 * MIB)


def test_what_another_engine_holds_is_outside(path: Path, measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredCpu, "held", 5 * MIB)
    monkeypatch.setattr(MeasuredCpu, "free", 55 * MIB)
    with make(path) as llm:
        memory = llm.llm_engine.client.core.executor.memory()  # type: ignore[attr-defined]
        assert (memory.largest_step, memory.outside) == (40 * MIB, 15 * MIB)


def test_a_cache_of_bytes_must_leave_room_for_the_largest_step(path: Path, measured: None) -> None:
    with pytest.raises(
        ConfigError, match=r"and what the largest step takes .* kv_cache_memory_bytes to (\d+),"
    ) as raised:
        make(path, kv_cache_memory_bytes=59 * MIB)
    fits = re.search(r"kv_cache_memory_bytes to (\d+),", str(raised.value))
    assert fits is not None and int(fits[1]) == 20 * MIB
    make(path, kv_cache_memory_bytes=int(fits[1])).close()


def test_a_cache_of_blocks_must_leave_room_for_the_largest_step(
    path: Path, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(path) as llm:
        block = llm.llm_engine.client.core.block_bytes  # type: ignore[attr-defined]
    monkeypatch.setattr(MeasuredCpu, "free", MeasuredCpu.step + 20 * block)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": None}
    with pytest.raises(ConfigError, match=r"; lower num_gpu_blocks_override to 20, or max_num_batched_tokens\.$"):
        make(path, num_gpu_blocks_override=21, **settings)
    make(path, num_gpu_blocks_override=20, **settings).close()
