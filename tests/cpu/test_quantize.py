"""Quantizing: at load, and `kvasir quantize`, whose checkpoints transformers loads through compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import kernels
from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.entrypoints.cli.main import main
from kvasir.kernels.cpu.packed import BF16, INT4, INT6, pack
from kvasir.layers.base import Build
from kvasir.layers.mlp import Experts
from kvasir.models.checkpoint import QuantizedSafetensors, Safetensors
from kvasir.models.loader import load
from kvasir.models.native import PACKED_VERSION
from kvasir.quantization.base import Unquantized
from kvasir.quantization.coded import QUANTIZERS, Coded, int4
from kvasir.quantization.coded_linear import CodedMethods
from kvasir.quantization.cpu import CpuLinear, CpuMethods
from kvasir.quantization.formats import find_format
from tests.model_builders import PagedModel, make_config, make_hf_model
from tests.native_builders import SETS, require_library

CPU = torch.device("cpu")
TEXT = list(range(5, 25))
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NEAR = {"int4": 0.11, "int8": 0.01, "fp8": 0.03, "fp8_block": 0.03}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def median(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the tokens: where two experts are nearly as good for one, it may go to either."""
    return sorted(error(one, other) for one, other in zip(got, wanted, strict=True))[len(got) // 2]


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    make_hf_model(request.param, **WIDE).to(torch.bfloat16).save_pretrained(place / "plain")
    return place / "plain"


def config_for(path: Path, **settings: Any) -> Any:
    return resolve(EngineArgs(str(path), device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False, **settings))


@pytest.mark.parametrize("way", QUANTIZERS)
def test_codes_are_near_the_weights(way: str) -> None:
    weight = torch.randn(70, 384) * 0.05
    weight[0] = 0  # a row of zeros stays one
    coded = QUANTIZERS[way](weight)
    assert error(coded.expand(), weight) < NEAR[way]
    assert not coded.expand()[0].any() if way != "int4" else coded.expand()[0].abs().max() < 1e-6
    assert torch.equal(coded.packed().expand(), coded.expand())


def test_searched_scales_are_better_than_ranges() -> None:
    """By a tenth of the squared error for normal weights, and never worse for any group."""
    weight = torch.randn(64, 512)
    groups = weight.view(64, -1, 128)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    plain = (torch.round((groups - low) / scale) * scale + low - groups).square().sum(2)
    searched = (int4(weight).expand().view(groups.shape) - groups).square().sum(2)
    assert bool((searched <= plain * 1.0001).all()) and float(searched.sum() / plain.sum()) < 0.9
    whole, middle = int4(weight, zeros="own"), int4(weight, zeros="8")
    assert middle.minimum is not None and torch.equal(-8 * middle.scale, middle.minimum)
    scale = groups.abs().amax(2, keepdim=True) / 7.5
    simple = (groups / scale).round().clamp(-8, 7).mul(scale).view(weight.shape)
    assert error(middle.expand(), weight) < 0.97 * error(simple, weight)
    assert whole.minimum is not None
    zeros = -whole.minimum / whole.scale
    assert torch.equal(zeros, zeros.round()) and error(whole.expand(), weight) < 0.11


@pytest.mark.parametrize("to", [pytest.param("int4", marks=pytest.mark.slow), "int8", "fp8"])
def test_a_written_checkpoint_is_read_by_transformers_and_by_us(to: str, checkpoint: Path, tmp_path: Path) -> None:
    disable_quantization = pytest.importorskip("compressed_tensors.quantization").disable_quantization
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    out = tmp_path / "out"
    assert main(["quantize", str(checkpoint), "--to", to, "--out", str(out), "--device", "cpu"]) == 0
    form = find_format(json.loads((out / "config.json").read_text()), out)
    assert form is not None
    ours, plain = QuantizedSafetensors(Safetensors(out), form, CPU), Safetensors(checkpoint)
    assert ours.entries.keys() == plain.entries.keys()
    source, quantized = dict(plain.read(plain.entries)), 0
    values = {}
    for name, tensor in ours.read(ours.entries):
        quantized += isinstance(tensor, Coded)
        values[name] = tensor.expand() if isinstance(tensor, Coded) else tensor.float()
        if isinstance(tensor, Coded):
            assert error(values[name], source[name]) < NEAR[to], name
        else:
            assert torch.equal(values[name], source[name].float()), name
    assert quantized >= 14
    assert (out / "model.safetensors").stat().st_size < 0.75 * (checkpoint / "model.safetensors").stat().st_size
    options = CompressedTensorsConfig(run_compressed=False)  # it expands the weights, and rounds no activations
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, quantization_config=options)
    compared, has_experts = 0, "mixtral" in str(checkpoint)  # transformers stacks them, so their logits are compared
    for name, weight in theirs.state_dict().items():
        if name in values and name.endswith("_proj.weight"):
            compared += 1
            assert torch.equal(weight, values[name].bfloat16()), name
    assert compared == (sum(".self_attn." in name for name in values) if has_experts else quantized)
    theirs.apply(disable_quantization)  # of activations, which transformers rounds to 8 bits otherwise
    with torch.inference_mode():
        wanted = theirs(torch.tensor([TEXT]), use_cache=False).logits[0].float()
    with kernels.reference_only():
        model = load(config_for(out, dtype="bfloat16", attention_backend="torch"), CPU)
        got = PagedModel(model).step({"text": TEXT})["text"].float()
    assert median(got, wanted) < 0.02


def test_what_cannot_be_quantized_is_said(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(checkpoint), "--to", "int8", "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    out = tmp_path / "once"
    assert main(["quantize", str(checkpoint), "--to", "int8", "--out", str(out), "--device", "cpu"]) == 0
    assert main(["quantize", str(out), "--to", "int4", "--out", str(tmp_path / "twice"), "--device", "cpu"]) == 2
    assert "quantized already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["granitemoe", "dbrx", "gpt_oss"])
def test_experts_in_one_tensor_stay_as_they_are(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    """Which is said; all else is quantized, and the copy loads."""
    make_hf_model(name).save_pretrained(tmp_path / "plain")
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path / "plain"), "--to", "int8", "--out", str(out), "--device", "cpu"]) == 0
    assert any("stay as they are" in line and "experts" in line for line in log_lines)
    got, wanted = (
        PagedModel(load(make_config(path), CPU)).step({"text": TEXT})["text"] for path in (out, tmp_path / "plain")
    )
    assert 1e-4 < median(got, wanted) < 0.1


@pytest.mark.skipif(not SETS, reason="no CPU library")
@pytest.mark.parametrize("way", ["fp8", "fp8_block"])
def test_at_load_on_a_cpu(way: str, checkpoint: Path, log_lines: list[str]) -> None:
    """Within what the way costs of the unquantized model, in half its memory; experts, too."""
    plain = load(config_for(checkpoint, dtype="bfloat16"), CPU)
    model = load(config_for(checkpoint, quantization=way), CPU)
    assert any("as 8-bit integers in groups of 32" in line for line in log_lines)
    assert model.weight_bytes() < 0.7 * plain.weight_bytes()
    experts = model.model.layers[0].mlp if hasattr(model.model.layers[0].mlp, "experts") else None
    if experts is None:
        wanted, got = (PagedModel(one).step({"text": TEXT})["text"] for one in (plain, model))
        assert 1e-3 < error(got, wanted) < 0.3  # random weights forgive little
        return
    values, weights = plain.model.layers[0].mlp.experts.stacks, experts.experts.stacks
    for name, stack in weights.items():
        rows = torch.arange(stack.layout.outputs)
        source = values[name].matrix(1).rows(rows).float()
        coded = QUANTIZERS[way](source).expand()
        near = error(stack.matrix(1).rows(rows).float(), coded if way == "fp8" or name == "down" else source)
        assert near < (6e-3 if way == "fp8" or name == "down" else 0.04)


@pytest.mark.slow
@pytest.mark.skipif(not SETS, reason="no CPU library")
def test_a_quantized_mixture_runs(checkpoint: Path, tmp_path: Path) -> None:
    """The library computes with the experts' own codes what plain torch computes with their values."""
    out = tmp_path / "out"
    assert main(["quantize", str(checkpoint), "--to", "int4", "--out", str(out), "--device", "cpu"]) == 0
    got = PagedModel(load(config_for(out, dtype="bfloat16"), CPU)).step({"text": TEXT})["text"]
    wanted = PagedModel(load(config_for(out, dtype="float32", attention_backend="torch"), CPU)).step({"text": TEXT})[
        "text"
    ]
    assert median(got, wanted) < 0.16


@pytest.mark.slow
def test_coded_experts_compute_what_their_values_do() -> None:
    """The method of a GPU, on a CPU by its reference: with biases, too."""
    chosen, weights = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 0]]), torch.rand(5, 2)
    x, found = torch.randn(5, 128), []
    for methods in (CodedMethods(int4), Unquantized()):
        torch.manual_seed(1)
        layer = Experts(Build(torch.float32, methods=methods, device=CPU), "experts", 4, 128, 256, bias=True)
        for key, shape in layer.tensors().items():
            values = torch.randn(shape) * 0.05
            plain = isinstance(methods, CodedMethods) or len(shape) == 1
            layer.load(key, values if plain else int4(values).expand())
        layer.process()
        found.append(layer.method.apply(layer, x, weights, chosen, "silu"))
        assert ("stacks" in layer.__dict__ and len(layer.__dict__["stacks"]) == 2) == isinstance(methods, CodedMethods)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_sensitive_matrices_have_six_bits_in_the_cpu_library() -> None:
    """With int4: queries, keys and values, and all of the first and the last layer."""
    methods = CpuMethods("int4", num_layers=12)
    for prefix, form in {
        "layers.0.mlp.gate_up": INT6,
        "layers.11.mlp.down": INT6,
        "layers.11.attention.o": INT6,
        "layers.1.mlp.gate_up": INT4,
        "layers.10.mlp.down": INT4,
        "layers.5.attention.qkv": INT6,
        "layers.5.attention.o": INT4,
        "layers.0.mlp.router": BF16,
    }.items():
        assert methods.linear(prefix) == CpuLinear(form), prefix
    assert PACKED_VERSION >= 5, "files of version 4 hold the ends in 4 bits"


def test_large_numbers_count_more_in_the_search_of_the_cpu_library() -> None:
    require_library()
    torch.manual_seed(0)
    weight = torch.randn(64, 256).mul(0.02)
    groups = weight.view(64, -1, 32)
    counts = groups.abs() + groups.square().mean(2, keepdim=True).sqrt()
    ours, alike = (
        float((counts * (each.view(groups.shape) - groups).square()).sum())
        for each in (pack(weight, INT4).rows(torch.arange(64)).float(), int4(weight, 32).expand().float())
    )
    assert ours < 0.97 * alike, "the other search counts all numbers alike"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["int8", "int4"])
def test_a_quantized_head_as_an_option(way: str, tied: bool, tmp_path: Path) -> None:
    """The method of a GPU, on a CPU by its reference: transformers' logits with the values of the codes. The embedding
    is quantized only where the head shares it."""
    model = make_hf_model("llama", hidden_size=128, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.copy_(QUANTIZERS[way](model.lm_head.weight.data).expand())
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    ours = load(make_config(tmp_path, head_quantization=way), CPU)
    torch.testing.assert_close(PagedModel(ours).step({"text": TEXT})["text"], wanted, rtol=1e-4, atol=1e-4)
    assert isinstance(ours.embedding.coded if tied else ours.head.coded, Coded) and (
        tied or ours.embedding.coded is None
    )
    assert load(make_config(tmp_path, head_quantization=way, load_format="dummy"), CPU).weight_bytes() == (
        ours.weight_bytes()
    )


@pytest.mark.skipif(not SETS, reason="no CPU library")
def test_the_head_in_the_library(checkpoint: Path, tmp_path: Path, log_lines: list[str]) -> None:
    """Beside a quantized checkpoint, whose own head is not quantized, and against the default of int8."""
    out = tmp_path / "out"
    assert main(["quantize", str(checkpoint), "--to", "int4", "--out", str(out), "--device", "cpu"]) == 0
    for path, settings, said in (
        (out, {}, "2 as bfloat16"),
        (out, {"head_quantization": "int8"}, "1 as 8-bit integers in groups of 32"),
        (out, {"head_quantization": "int4"}, "1 as 6-bit integers in groups of 32"),
        (checkpoint, {"head_quantization": "int8"}, "1 as 8-bit integers in groups of 32"),
        (checkpoint, {"quantization": "int8", "head_quantization": "none"}, "2 as bfloat16"),
    ):
        del log_lines[:]
        load(config_for(path, dtype="bfloat16", **settings), CPU)
        (held,) = [line for line in log_lines if "matrices: " in line]
        assert said in held or "mixtral" in str(checkpoint), (settings, held)  # routers stay in bfloat16
