"""Every architecture's logits equal transformers': whole, in chunks, token by token, and mixed with other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.layers.linear import Linear
from kvasir.layers.spec import AttentionSpec, GatedMLPSpec, LatentAttentionSpec, MoESpec, RMSNormSpec
from kvasir.models.loader import load_model
from kvasir.models.spec import LayerSpec
from kvasir.models.transformer import DecoderLayer, Transformer
from tests.model_builders import REPRESENTATIVE, TINY, PagedModel, make_config, make_hf_model, save
from tests.pairwise import few

LENGTHS = (41, 23, 6, 1)  # the longest is well past every window


class Pair:
    """A model of ours and what transformers says to some texts."""

    def __init__(self, name: str, directory: Path) -> None:
        self.hf = make_hf_model(name)
        self.ours = load_model(make_config(save(self.hf, directory)), torch.device("cpu"))
        rng = np.random.default_rng(1)
        self.texts = {str(n): rng.integers(0, self.hf.config.vocab_size, n).tolist() for n in LENGTHS}
        self.expected = {key: hf_logits(self.hf, text) for key, text in self.texts.items()}


def hf_logits(model: Any, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0]
    return logits.float()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(request.param, tmp_path_factory.mktemp(request.param))


every_architecture = pytest.mark.parametrize("pair", list(TINY), indirect=True, scope="module")
some_architectures = pytest.mark.parametrize(
    "pair", few(list(TINY), fast=REPRESENTATIVE), indirect=True, scope="module"
)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=3e-5, rtol=1e-5)


def run(model: Transformer, steps: list[dict[str, list[int]]], slack: int = 0) -> dict[str, torch.Tensor]:
    paged, found = PagedModel(model), {}
    for step in steps:
        for key, logits in paged.step(step, slack).items():
            found[key] = torch.cat([found[key], logits]) if key in found else logits
    return found


def cut(text: list[int], sizes: list[int]) -> list[list[int]]:
    ends = [*np.cumsum(sizes).tolist(), len(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False) if text[begin:end]]


@some_architectures
def test_prefill(pair: Pair) -> None:
    found = run(pair.ours, [pair.texts])
    for key, expected in pair.expected.items():
        close(found[key], expected)


@some_architectures
@pytest.mark.parametrize("sizes", [[5, 1, 7, 16], [16, 16], [3, 2, 1, 1, 30]], ids=str)
def test_chunked_prefill(pair: Pair, sizes: list[int]) -> None:
    found = run(pair.ours, [{"41": chunk} for chunk in cut(pair.texts["41"], sizes)])
    close(found["41"], pair.expected["41"])


@some_architectures
def test_decode(pair: Pair) -> None:
    found = run(pair.ours, [{"41": chunk} for chunk in cut(pair.texts["41"], [4, *[1] * 37])])
    close(found["41"], pair.expected["41"])


@every_architecture
def test_one_row_in_fewer_launches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way of layers that have one, which a GPU takes, with the plain operations."""
    counted = []
    original = DecoderLayer._one_row

    def counting(self: DecoderLayer, *arguments: Any) -> torch.Tensor:
        counted.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(DecoderLayer, "_one_row", counting)
    monkeypatch.setattr(kernels, "fuses_one_row", lambda x: len(x) == 1)
    found = run(pair.ours, [{"6": chunk} for chunk in cut(pair.texts["6"], [2, 1, 1, 1])])
    close(found["6"], pair.expected["6"])
    fuses = [layer.fuses for layer in pair.ours.layers]
    assert len(counted) == 4 * len(fuses) or not all(fuses)
    assert fuses == [is_plain(layer) for layer in pair.ours.spec.layers]


def is_plain(layer: LayerSpec) -> bool:
    """Whether a layer is one whose norms, activation and residual go into the products."""
    norms = [layer.attention_norm, layer.mlp_norm]
    bare = layer.attention_post_norm is layer.mlp_post_norm is None and layer.residual_scale == 1.0
    mlp = layer.mlp
    gated = isinstance(mlp, GatedMLPSpec) and mlp.activation == "silu"
    if isinstance(mlp, MoESpec):
        gated = not mlp.weighs_inputs
        if mlp.shared is not None:
            multiple = mlp.shared.mlp.intermediate_size % mlp.intermediate_size == 0
            gated &= multiple and not mlp.shared.gated and mlp.shared.mlp.activation == mlp.activation
    gated = gated and isinstance(layer.attention, AttentionSpec | LatentAttentionSpec)
    return type(layer) is LayerSpec and bare and gated and all(isinstance(norm, RMSNormSpec) for norm in norms)


@every_architecture
def test_parts_that_norms_sum(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose sums are left to the norm that follows, as on a GPU."""
    counted = []

    def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        counted.append(1)
        y = kernels.linear(x, weight)
        return torch.stack([0.25 * y, 0.75 * y])

    monkeypatch.setattr(kernels, "linear_parts", in_parts)
    found = run(pair.ours, [pair.texts])
    for key, expected in pair.expected.items():
        close(found[key], expected)
    leave = [linear for linear in linears(pair.ours) if linear.leaves_parts]
    assert bool(counted) == any(linear.bias is None for linear in leave)
    layers = pair.ours.spec.layers
    sequential = all(type(layer) is LayerSpec and layer.residual_scale == 1.0 for layer in layers)
    into_norms = all(isinstance(layer.mlp_norm, RMSNormSpec) and layer.mlp_post_norm is None for layer in layers)
    dense = [layer for layer in layers if not isinstance(layer.mlp, MoESpec)]
    assert len(leave) == (len(layers) + len(dense) if sequential and into_norms else 0)


def linears(model: Transformer) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@some_architectures
def test_only_the_last_tokens_leave(pair: Pair) -> None:
    """Most of the last layer is spared the other tokens, whose keys must be there all the same."""
    paged = PagedModel(pair.ours)
    first = {key: text[:-3] for key, text in pair.texts.items() if len(text) > 4}
    for end, found in ((-3, paged.step(first, last=True)), (None, paged.step({k: pair.texts[k][-3:] for k in first}))):
        for key in first:
            expected = pair.expected[key][:end]
            close(found[key], expected[-len(found[key]) :])
            assert len(found[key]) == (1 if end else 3)


@every_architecture
@pytest.mark.parametrize("seed", few(range(3), fast=[0]))
def test_mixed_batches(pair: Pair, seed: int) -> None:
    """Decodes and chunks of several sequences in every step, joining and ending at different times."""
    rng = np.random.default_rng(seed)
    steps: list[dict[str, list[int]]] = [{} for _ in range(64)]
    for key, text in pair.texts.items():
        sizes = np.where(rng.random(64) < 0.5, 1, rng.integers(2, 9, 64)).tolist()
        start = int(rng.integers(0, 4))
        for step, chunk in enumerate(cut(text, sizes), start):
            steps[step][key] = chunk
    found = run(pair.ours, [step for step in steps if step], slack=5)
    for key, expected in pair.expected.items():
        close(found[key], expected)


def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    hf = make_hf_model("qwen3").to(torch.bfloat16)
    ours = load_model(make_config(save(hf, tmp_path), dtype="bfloat16"), torch.device("cpu"))
    text = np.random.default_rng(0).integers(0, 96, 30).tolist()
    exact = hf_logits(hf.float(), text)
    theirs = (hf_logits(hf.to(torch.bfloat16), text) - exact).abs().mean()
    error = (run(ours, [{"a": text[:20]}, {"a": text[20:]}])["a"] - exact).abs().mean()
    assert error < 1.2 * theirs, f"our mean error {error:.4f} is more than transformers' own {theirs:.4f}"


def test_windows_really_hide(tmp_path: Path) -> None:
    """What lies before the window of every layer cannot change the logits; without a window it does."""
    texts = {"a": [1, *range(2, 32)], "b": [50, *range(2, 32)]}
    for window, equal in ((4, True), (None, False)):
        hf = make_hf_model("mistral", sliding_window=window)
        ours = load_model(make_config(save(hf, tmp_path / str(window))), torch.device("cpu"))
        found = run(ours, [texts])
        assert torch.allclose(found["a"][-1], found["b"][-1], atol=1e-6) is equal


def test_positions_are_bounded_by_max_model_len(tmp_path: Path) -> None:
    path = save(make_hf_model("llama"), tmp_path)
    model = load_model(make_config(path, max_model_len=64), torch.device("cpu"))
    assert [len(rotary.table) for rotary in model.rotaries] == [64]
    assert len({id(layer.attention.rotary) for layer in model.layers}) == 1


def test_long_factors_where_the_engine_is_built_for_long_texts(tmp_path: Path) -> None:
    """transformers turns to them once a text is longer than the trained length; ours are a property of the engine."""
    hf = make_hf_model("phi3_longrope_partial")
    hf.config.rope_parameters["original_max_position_embeddings"] = hf.config.original_max_position_embeddings = 16
    path = save(hf, tmp_path)
    long = load_model(make_config(path, max_model_len=64), torch.device("cpu"))
    short = load_model(make_config(path, max_model_len=16), torch.device("cpu"))
    text = np.random.default_rng(0).integers(0, 96, 40).tolist()
    theirs = type(hf)(hf.config).eval()
    theirs.load_state_dict(hf.state_dict())
    close(run(long, [{"a": text[:25]}, {"a": text[25:]}])["a"], hf_logits(theirs, text))
    close(run(short, [{"a": text[:9]}, {"a": text[9:16]}])["a"], hf_logits(theirs, text[:16]))


def test_dynamic_scaling_is_that_of_generating_with_a_cache(tmp_path: Path) -> None:
    """Every token is rotated as transformers rotates it when it is the last one."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    hf = make_hf_model("llama", rope_parameters=rope, max_position_embeddings=16)
    ours = load_model(make_config(save(hf, tmp_path), max_model_len=48), torch.device("cpu"))
    text = np.random.default_rng(0).integers(0, 96, 40).tolist()
    cache, expected = None, []
    with torch.inference_mode():
        for token in text:
            out = hf(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected.append(out.logits[0])
    close(run(ours, [{"a": text[:30]}, {"a": text[30:]}])["a"], torch.cat(expected))
