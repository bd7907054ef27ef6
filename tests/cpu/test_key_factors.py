"""Keys of 8 bits whose channels differ widely: weights take factors that change no score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.models.key_factors import even_out_keys
from kvasir.models.loader import load
from tests.model_builders import PagedModel, make_config, make_hf_model, save
from tests.native_builders import require_library

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
Loader = Callable[..., Any]


@pytest.fixture
def loaded(tmp_path: Path) -> Loader:
    require_library()

    def get(name: str, power: float, **settings: Any) -> Any:
        hf = make_hf_model(name, **SIZES)
        spread_keys(hf, power)
        path = save(hf, tmp_path / name)
        return load(make_config(path, "cpu", dtype="bfloat16", **settings), torch.device("cpu"))

    return get


def spread_keys(hf: Any, power: float) -> None:
    """Keys times powers of two, and queries divided by them, which changes no score."""
    for name, module in hf.named_modules():
        if not name.endswith(("self_attn.k_proj", "k_norm")):
            continue
        config, normed = hf.config, name.endswith("k_norm")
        if not normed and hasattr(hf.get_submodule(name.rsplit(".", 1)[0]), "k_norm"):
            continue
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        spread = torch.exp2(torch.randn(dim // 2).mul(power).round()).repeat(2)
        queries = hf.get_submodule(name.replace("k_norm", "q_norm").replace("k_proj", "q_proj"))
        for layer, factor in ((module, spread), (queries, 1 / spread)):
            for tensor in layer.parameters():
                shape = (-1, dim, *tensor.shape[1:])
                tensor.data = (tensor.data.view(shape) * factor.view(dim, *[1] * (tensor.dim() - 1))).view_as(tensor)


def logits(model: Any, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(0)
    paged = PagedModel(model, num_blocks=64, kv_dtype=dtype)
    return paged.step({"text": rng.integers(2, 96, 100).tolist()})["text"].float()


ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_biases", "olmo2", "cohere", "gpt2", "gptj", "stablelm"]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, None) for name in (*ARCHITECTURES, "mixtral")), ("qwen2", "int8"), ("llama", "int4"), ("cohere", "int8")],
)
def test_the_scores_stay_the_same(name: str, quantization: str | None, loaded: Loader) -> None:
    """With a cache of bfloat16, bit by bit where float16 has room for the scales."""
    model = loaded(name, 2.0, quantization=quantization)
    before = logits(model, torch.bfloat16)
    for layer in model.model.layers:
        even_out_keys(layer.attention, getattr(layer, "attention_norm", None))
        assert layer.attention.keys_are_even
    error = (logits(model, torch.bfloat16) - before).square().mean().sqrt() / before.std()
    assert error <= (0 if quantization is None else 0.01)


def test_keys_that_are_clipped_stay_as_they_are(loaded: Loader) -> None:
    """Factors would move channels across the limit."""
    model = loaded("olmoe", 2.0)
    before = logits(model, torch.bfloat16)
    for layer in model.model.layers:
        even_out_keys(layer.attention, layer.attention_norm)
    assert torch.equal(logits(model, torch.bfloat16), before)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral"])
def test_large_channels_of_keys_cost_little(name: str, loaded: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = logits(loaded(name, 2.5), torch.bfloat16)
    even = (logits(loaded(name, 2.5), torch.int8) - wanted).square().mean()
    monkeypatch.setattr("kvasir.models.native.even_out_keys", lambda attention, norm: None)
    plain = (logits(loaded(name, 2.5), torch.int8) - wanted).square().mean()
    assert even < plain / 4, f"the error is {even:.2g}, and {plain:.2g} without factors"
