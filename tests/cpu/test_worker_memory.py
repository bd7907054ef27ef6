"""What does not fit a device is refused at the start, with numbers and the settings to lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM
from kvasir.errors import ConfigError
from kvasir.worker import worker
from tests.model_builders import make_hf_model, save


def full(*args: Any, **settings: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_hf_model("llama"), tmp_path_factory.mktemp("model"))


def make(path: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 64, "dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 1 << 20, **settings}
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
