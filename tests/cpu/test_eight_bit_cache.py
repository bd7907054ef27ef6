"""A KV cache of 8-bit floats: what is stored, what that costs in precision and saves in memory, and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir import SamplingParams
from kvasir.config import resolve
from kvasir.config.engine import CacheConfig
from kvasir.errors import ConfigError, ModelError
from kvasir.kernels import reference
from kvasir.models.loader import load_model
from kvasir.platforms.cpu import CpuPlatform
from tests.engine_builders import SMALL, Model, generate, metric, tokens
from tests.model_builders import PagedModel, make_config, make_hf_model, save

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]
STEPS = [{"a": list(range(9)), "b": [5]}, {"a": [3], "b": [1, 2, 3]}, {"a": [7], "b": [4]}]


def scores(model: Model, **settings: Any) -> torch.Tensor:
    """Log-probabilities of all prompts' tokens."""
    settings = {"attention_backend": "torch", "device": "cpu", "dtype": "float32", **SMALL, **settings}
    with model.llm(**settings) as llm:
        said = generate(llm, model.prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return torch.tensor([next(iter(entry.values())).logprob for output in said for entry in output.prompt_logprobs[1:]])


# ---------------------------------------------------------------- what is stored


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_too_large_becomes_the_largest(kind: torch.dtype) -> None:
    most = torch.finfo(kind).max
    key = torch.tensor([1.0, -0.3, 1e6, -1e6, most, most * 1.06, 0.0, 1e-9]).view(1, 1, 8)
    cache = torch.zeros(2, 2, 4, 1, 8, dtype=torch.uint8).view(kind)
    reference.store_kv(key, -key, cache, torch.tensor([6]))
    stored = cache.float()[1, :, 2, 0]
    assert stored[0].tolist() == [1.0, pytest.approx(-0.3, rel=0.07), most, -most, most, most, 0.0, 0.0]
    assert torch.equal(stored[1], -stored[0])
    assert cache.float().count_nonzero() == 2 * 6, "another slot was touched"


# The tiny models have windows, soft caps, norms of queries and keys; steps are chunked and mixed.
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral_window"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_a_cache_of_rounded_values(
    name: str, kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(make_config(save(make_hf_model(name), tmp_path)), torch.device("cpu"))

    def logits(kv_dtype: torch.dtype | None) -> torch.Tensor:
        paged = PagedModel(model, kv_dtype=kv_dtype)
        return torch.cat([rows for step in STEPS for rows in paged.step(step).values()])

    exact, ours, store = logits(None), logits(kind), reference.store_kv

    def store_rounded(key: torch.Tensor, value: torch.Tensor, *where: Any) -> None:
        store(key.to(kind).float(), value.to(kind).float(), *where)

    monkeypatch.setattr(reference, "store_kv", store_rounded)
    torch.testing.assert_close(ours, logits(None), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, exact, atol=1e-3)


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


def test_how_much_is_lost(model: Model) -> None:
    """e4m3 keeps three bits after the first, e5m2 two: the second loses about twice as much."""
    exact = scores(model)
    lost = {kind: (scores(model, kv_cache_dtype=kind) - exact).abs().mean() for kind in ("fp8_e4m3", "fp8_e5m2")}
    spread = exact.std()
    assert 0 < lost["fp8_e4m3"] < 0.04 * spread
    assert lost["fp8_e4m3"] < lost["fp8_e5m2"] < 0.08 * spread
    assert torch.equal(scores(model, kv_cache_dtype="fp8"), scores(model, kv_cache_dtype="fp8_e4m3"))


def test_twice_the_blocks_fit_and_preemption_and_swapping_change_nothing(model: Model) -> None:
    settings = {**SMALL, "attention_backend": "torch", "device": "cpu", "dtype": "bfloat16"}
    counts = {}
    for kind in ("auto", "fp8"):
        with model.llm(**settings, kv_cache_dtype=kind, kv_cache_memory_bytes=30_000, max_model_len=64) as llm:
            counts[kind] = metric(llm, "kv_cache_blocks")
    assert counts["fp8"] == pytest.approx(2 * counts["auto"], abs=2)
    settings |= {"kv_cache_dtype": "fp8", "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with model.llm(**settings) as llm:
        wanted = tokens(generate(llm, model.prompts, params))
    tight = {"num_gpu_blocks_override": 40, "swap_space": 0.01, "preemption_mode": "swap"}
    with model.llm(**settings, **tight) as llm:
        assert tokens(generate(llm, model.prompts, params)) == wanted
        assert metric(llm, "num_preemptions_swapped") > 0


def test_the_types_there_are(model: Model) -> None:
    with pytest.raises(ConfigError, match="must be the model's float32"):
        model.llm(device="cpu", dtype="float32", kv_cache_dtype="float16")
    with pytest.raises(ConfigError, match="fp8_e5m2"):
        model.llm(device="cpu", kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="Kvasir's C\\+\\+ library"):
        model.llm(device="cpu", dtype="float32", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="one of torch, triton"):
        resolve._check_eight_bit(CacheConfig(kv_cache_dtype="fp8"), "cpu", CpuPlatform("cpu"))


def test_bfloat16_on_a_cpu_runs_it_unasked(model: Model) -> None:
    """Whatever backend bfloat16 has there otherwise."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with model.llm(**SMALL, device="cpu", dtype="bfloat16", kv_cache_dtype="fp8") as llm:
        said = generate(llm, model.prompts, params)
    assert [len(text) for text in tokens(said)] == [8] * len(model.prompts)


# ---------------------------------------------------------------- a checkpoint's scales


def rescaled(tmp_path: Path, name: str, scales: dict[str, list[float]]) -> Path:
    path = save(make_hf_model(name), tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {key: torch.tensor(value) for key, value in scales.items()}, path / "model.safetensors")
    return path


def run_eight_bit(path: Path) -> tuple[torch.Tensor, Any]:
    config = replace(make_config(path), cache=CacheConfig(block_size=4, kv_dtype="float8_e4m3fn"))
    model = load_model(config, torch.device("cpu"))
    paged = PagedModel(model, kv_dtype=torch.float8_e4m3fn)
    return torch.cat([rows for step in STEPS for rows in paged.step(step).values()]), model


def test_a_checkpoints_scales_are_used(tmp_path: Path) -> None:
    """Keys of one layer and values of another, far too large or small for the type without them."""
    names = {"model.layers.0.self_attn.k_scale": [64.0], "model.layers.2.self_attn.v_proj.v_scale": [0.25]}
    path = rescaled(tmp_path, "llama", names)
    exact = PagedModel(load_model(make_config(path), torch.device("cpu")))
    wanted = torch.cat([rows for step in STEPS for rows in exact.step(step).values()])
    got, model = run_eight_bit(path)
    assert [layer.k_scale for layer in model.attentions()] == [64.0, 1.0, 1.0]
    assert [layer.v_scale for layer in model.attentions()] == [1.0, 1.0, 0.25]
    assert (got - wanted).abs().mean() < 0.1 * wanted.std()


def test_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    path = rescaled(tmp_path, "llama", {"model.layers.1.self_attn.k_scale": [0.5] * 5})
    with pytest.raises(ModelError, match="one positive number or one for each of"):
        run_eight_bit(path)
    load_model(make_config(path), torch.device("cpu"))  # not read where the cache has the model's type
