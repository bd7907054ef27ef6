"""The decoder and the torch attention backend on a GPU: what the CPU says, without ever waiting for the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir import platforms
from kvasir.models.loader import load_model
from tests.model_builders import TINY, PagedModel, make_config, make_hf_model, save

pytestmark = pytest.mark.gpu

STEPS = [
    {"a": 17, "b": 1, "c": 6},
    {"a": 1, "b": 9, "c": 1},
    {"a": 1, "b": 1, "c": 20},
    {"a": 1, "b": 1, "c": 1, "d": 40},  # decodes of unlike length: two groups
    {"a": 3, "b": 1, "c": 1, "d": 1},
]


def logits(path: Path, device: str, dtype: str = "float32") -> torch.Tensor:
    rng = np.random.default_rng(0)
    paged = PagedModel(load_model(make_config(path, dtype=dtype), torch.device(device)), device=device)
    found = []
    for step in STEPS:
        work = {name: rng.integers(0, 96, tokens).tolist() for name, tokens in step.items()}
        found += [rows for _, rows in sorted(paged.step(work, slack=3).items())]
    return torch.cat(found)


@pytest.mark.parametrize("name", sorted(set(TINY) - {"internlm2"}))
def test_gpu_equals_cpu_without_waiting(name: str, tmp_path: Path) -> None:
    path = save(make_hf_model(name), tmp_path)
    torch.testing.assert_close(logits(path, "cuda"), logits(path, "cpu"), atol=1e-4, rtol=1e-4)


def test_bfloat16_without_waiting(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen3"), tmp_path)
    exact = logits(path, "cpu")
    on_gpu, on_cpu = ((logits(path, device, "bfloat16") - exact).abs().mean() for device in ("cuda", "cpu"))
    assert on_gpu < 1.5 * on_cpu


def test_dummy_weights_are_made_on_the_device(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen3"), tmp_path)
    model = load_model(make_config(path, load_format="dummy"), torch.device("cuda"))
    assert {value.device.type for value in model.parameters()} == {"cuda"}
    assert 0.015 < model.embedding.weight.std().item() < 0.025


def test_platform_counts_memory() -> None:
    platform = platforms.select("cuda")
    before, total = platform.memory_used(), platform.memory_bytes()
    platform.reset_memory_peak()
    held = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    assert platform.memory_used() - before >= held.nbytes
    free = platform.memory_free()
    assert total is not None and free is not None and free < total
    del held
    assert platform.memory_peak() - before >= 1 << 26
    platform.release_memory()
    platform.synchronize()
    assert platform.default_dtype("float32") in ("bfloat16", "float16")
