"""Every architecture as the CPU library runs it, against the same model on plain torch, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.errors import ConfigError
from kvasir.kernels.cpu import library
from kvasir.kernels.cpu.packed import PackedMatrix
from kvasir.layers.spec import LatentAttentionSpec, MoESpec
from kvasir.models.loader import load
from kvasir.models.native import STEPS, LayerByLayer, NativeDecoder
from tests.model_builders import REPRESENTATIVE, TINY, PagedModel, make_config, make_hf_model, save
from tests.native_builders import SETS, require_library
from tests.pairwise import few

LENGTHS = (41, 23, 6, 1)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_library()
    yield save(make_hf_model(request.param), tmp_path_factory.mktemp(request.param))


def run(config_path: Path, backend: str, texts: dict[str, list[int]], **settings: object) -> dict[str, torch.Tensor]:
    """Logits of all texts: most of each as one chunk, the rest token by token, all together."""
    config = make_config(config_path, backend, dtype="bfloat16", **settings)
    paged = PagedModel(load(config, torch.device("cpu")))
    found = paged.step({key: text[: max(1, len(text) - 3)] for key, text in texts.items()})
    for at in range(-3, 0):
        for key, logits in paged.step({key: text[at:][:1] for key, text in texts.items() if len(text) > 3}).items():
            found[key] = torch.cat([found[key], logits])
    return found


def make_texts(vocabulary: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    return {str(n): rng.integers(0, vocabulary, n).tolist() for n in LENGTHS}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


every_architecture = pytest.mark.parametrize("checkpoint", list(TINY), indirect=True, scope="module")
some_architectures = pytest.mark.parametrize(
    "checkpoint", few(list(TINY), fast=REPRESENTATIVE), indirect=True, scope="module"
)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    library.use_instruction_set(request.param)
    yield
    library.use_instruction_set(SETS[0])


@every_architecture
@pytest.mark.parametrize("instruction_set", SETS[:1], indirect=True)
def test_logits(checkpoint: Path, instruction_set: None) -> None:
    """As near to float32 as torch's bfloat16 is."""
    check_logits(checkpoint)


@some_architectures
@pytest.mark.parametrize("instruction_set", SETS[1:], indirect=True)
def test_logits_by_lesser_instruction_sets(checkpoint: Path, instruction_set: None) -> None:
    check_logits(checkpoint)


def check_logits(checkpoint: Path) -> None:
    config = make_config(checkpoint)
    texts = make_texts(config.model.vocab_size)
    model = load(config, torch.device("cpu"))
    exact = PagedModel(model).step(texts)
    with kernels.reference_only():
        theirs = run(checkpoint, "torch", texts)
    ours = run(checkpoint, "cpu", texts)
    if has_experts(model):  # rounding changes a few tokens' experts, other ones here and there
        ours, theirs, exact = ({0: joined(each)} for each in (ours, theirs, exact))
    far = median_error if has_experts(model) else error
    for key in exact:
        assert far(ours[key], exact[key]) < 1.5 * far(theirs[key], exact[key]) + 2e-3, key


@some_architectures
def test_only_the_last_tokens_leave(checkpoint: Path) -> None:
    config = make_config(checkpoint, "cpu", dtype="bfloat16")
    model, texts = load(config, torch.device("cpu")), make_texts(config.model.vocab_size)
    whole, last = PagedModel(model).step(texts), PagedModel(model).step(texts, last=True)
    for key in texts:
        assert error(last[key], whole[key][-1:]) < 1e-2


@some_architectures
def test_8_bit_cache(checkpoint: Path) -> None:
    config = make_config(checkpoint, "cpu", dtype="bfloat16")
    model, texts = load(config, torch.device("cpu")), make_texts(config.model.vocab_size)
    plain = PagedModel(model).step(texts)
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in model.model.spec.layers):
        with pytest.raises(ConfigError, match="'int8' is not supported for latent attention"):
            PagedModel(model, kv_dtype=torch.int8)
        return
    small = PagedModel(model, kv_dtype=torch.int8).step(texts)
    if has_experts(model.model):
        assert 0 < median_error(joined(small), joined(plain)) < 0.1
        return
    for key in texts:
        assert 0 < error(small[key], plain[key]) < 0.1


def with_the_weights_of(packed: torch.nn.Module, checkpoint: Path) -> torch.nn.Module:
    """The model on plain torch in float32, its weights what the packed ones mean."""
    plain = load(make_config(checkpoint), torch.device("cpu"))
    modules, replaced = dict(plain.named_modules()), 0
    for name, module in packed.named_modules():
        matrix = module.__dict__.get("matrix")
        if isinstance(matrix, PackedMatrix):
            meant = matrix.rows(torch.arange(matrix.layout.outputs)).float()
            was = modules[name].weight
            meant = kernels.pack_weight(meant) if was.is_mkldnn else meant
            modules[name].weight = torch.nn.Parameter(meant, requires_grad=False)
            replaced += 1
        for stacked, stack in module.__dict__.get("stacks", {}).items():  # experts
            every = torch.arange(stack.layout.outputs)
            meant = torch.stack([stack.matrix(number).rows(every).float() for number in range(len(stack.memory))])
            setattr(modules[name], stacked, torch.nn.Parameter(meant, requires_grad=False))
    assert replaced > 2, "layers, embedding and head"
    return plain


def has_experts(model: Any) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in model.spec.layers)


def joined(texts: dict[int, torch.Tensor]) -> torch.Tensor:
    """The logits of all texts: one wrong expert spoils a short text, and few tokens of all."""
    return torch.cat(list(texts.values()))


def median_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the tokens: where two experts are nearly as good for one, it may go to either, and the next ones see that."""
    return float(np.median([error(one, other) for one, other in zip(got, wanted, strict=True)]))


@some_architectures
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized(checkpoint: Path, quantization: str) -> None:
    """The weights lose what they lose; what is computed with them is right but for activations of 8 bits."""
    texts = make_texts(make_config(checkpoint).model.vocab_size)
    config = make_config(checkpoint, "cpu", dtype="bfloat16", quantization=quantization)
    model = load(config, torch.device("cpu"))
    exact = PagedModel(with_the_weights_of(model.model, checkpoint)).step(texts)
    found, unquantized = PagedModel(model).step(texts), run(checkpoint, "cpu", texts)
    if has_experts(model.model):
        assert median_error(joined(found), joined(exact)) < 0.15
    for key in texts:
        assert has_experts(model.model) or error(found[key], exact[key]) < 0.15, key  # random weights forgive little
        assert error(found[key], unquantized[key]) > 4e-3, "something was rounded"


@every_architecture
def test_what_runs_whole_is_said_and_counted(checkpoint: Path, log_lines: list[str]) -> None:
    config = make_config(checkpoint, "cpu", dtype="bfloat16")
    model = load(config, torch.device("cpu"))
    (line,) = [line for line in log_lines if "the CPU library" in line]
    before = STEPS.copy()
    PagedModel(model).step({"text": [1, 2]})
    if isinstance(model, NativeDecoder):
        assert "runs whole steps" in line
        assert STEPS - before == {"whole": 1}
    else:
        assert isinstance(model, LayerByLayer)
        why = (
            ("of the kind MoE", "of the kind LatentAttention")
            if has_experts(model.model)
            else ("embeddings are projected",)
        )
        assert "layer by layer" in line and any(reason in line for reason in why)
        assert STEPS - before == {"layer by layer": 1}


@pytest.mark.parametrize("name", ["qwen2", "llama_tied_biases_llama3", "mixtral"])
def test_packed_weights_are_kept(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    require_library()
    path, place = save(make_hf_model(name), tmp_path / "model"), tmp_path / "packed"
    settings = {"quantization": "int4", "packed_weights_dir": str(place)}
    texts = make_texts(make_config(path).model.vocab_size)
    first = run(path, "cpu", texts, **settings)
    (file,) = place.iterdir()
    assert not any("packed weights come from" in line for line in log_lines)
    second = run(path, "cpu", texts, **settings)
    assert any("packed weights come from" in line for line in log_lines)
    file.write_bytes(file.read_bytes()[:1000])  # a disk that was full
    third = run(path, "cpu", texts, **settings)
    assert any("packed again" in line for line in log_lines)
    for key in texts:
        assert torch.equal(first[key], second[key]) and torch.equal(first[key], third[key])
    run(path, "cpu", texts, **(settings | {"quantization": "int8"}))
    assert len(list(place.iterdir())) == 2
