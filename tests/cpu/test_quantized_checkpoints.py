"""Checkpoints that llm-compressor, GPTQModel, AutoAWQ, ModelOpt and bitsandbytes wrote, read in two ways."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvasir import LLM, SamplingParams, kernels
from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.errors import KvasirError, ModelError
from kvasir.layers.linear import Linear
from kvasir.layers.mesh import Mesh
from kvasir.models.checkpoint import QuantizedSafetensors, Safetensors
from kvasir.models.loader import load, load_model
from kvasir.quantization.coded import Coded
from kvasir.quantization.cpu import matrix_of
from kvasir.quantization.formats import find_format
from tests.model_builders import PagedModel
from tests.native_builders import SETS
from tests.numpy_formats import read_checkpoint
from tests.pairwise import few

CPU = torch.device("cpu")
TEXT = np.random.default_rng(1).integers(2, 500, 23).tolist()
NAMES = [
    *("autoawq-w4g128", "bitsandbytes-int8", "bitsandbytes-nf4", "gptqmodel-awq", "gptqmodel-g4", "gptqmodel-g4act"),
    *("gptqmodel-g4asym", "gptqmodel-g8", "gptqmodel-v2", "llmcompressor-fp8block", "llmcompressor-fp8dyn"),
    *("llmcompressor-fp8static", "llmcompressor-gptq_w4a16", "llmcompressor-gptq_w4a16_asym", "llmcompressor-kvfp8"),
    *("llmcompressor-kvhead", "llmcompressor-mxfp4", "llmcompressor-nvfp4", "llmcompressor-nvfp4a16"),
    *("llmcompressor-w8a16", "llmcompressor-w8a8", "modelopt-fp8", "modelopt-int4awq", "modelopt-nvfp4"),
]
# How far weights are from those that were quantized: as bits and groups imply.
BITS = {"g8": 0.02, "int8": 0.02, "w8": 0.02, "fp8": 0.04, "kvfp8": 0.04, "kvhead": 1e-6}


@pytest.fixture(scope="session")
def checkpoints(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("quantized")
    with tarfile.open(test_data / "quantized.tar.xz") as archive:
        archive.extractall(place, filter="data")
    (only,) = place.iterdir()
    assert sorted(path.name for path in only.iterdir()) == sorted([*NAMES, "source-bf16"]), "every one is tested"
    return only


def opened(directory: Path) -> QuantizedSafetensors:
    form = find_format(json.loads((directory / "config.json").read_text()), directory)
    assert form is not None
    return QuantizedSafetensors(Safetensors(directory), form, CPU)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def config_for(path: Path, **settings: Any) -> Any:
    return resolve(EngineArgs(str(path), device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False, **settings))


def logits(model: Any) -> torch.Tensor:
    paged = PagedModel(model)
    return torch.cat([paged.step({"text": TEXT[:20]})["text"], *(paged.step({"text": [t]})["text"] for t in TEXT[20:])])


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_the_formats(name: str, checkpoints: Path) -> None:
    """Bit by bit in float32; the packed and the narrowed forms have the same values."""
    wanted, source = read_checkpoint(checkpoints / name), read_plain(checkpoints / "source-bf16")
    checkpoint, quantized = opened(checkpoints / name), 0
    within = next((limit for part, limit in BITS.items() if part in name), 0.17)
    smoothed = "awq" in name  # its norms are changed with its matrices
    for weight, value in checkpoint.read([key for key in checkpoint.entries if key.endswith("_proj.weight")]):
        expected = torch.from_numpy(wanted[weight])
        assert tuple(value.shape) == tuple(expected.shape) == checkpoint.entries[weight].shape
        if isinstance(value, Coded):
            quantized += 1
            assert torch.equal(value.packed().expand(), value.expand()) and torch.equal(
                value.narrowed().expand(), value.expand()
            )
            assert value.packed().nbytes < expected.nbytes / 3
            value = value.expand()
        assert torch.equal(value.float(), expected), weight
        if not smoothed:
            assert error(expected, source[weight]) < within, weight
    assert quantized == (0 if name == "llmcompressor-kvhead" else 14)


def read_plain(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118


def transformers_logits(directory: Path, source: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).to(dtype).eval()
    weights = {name: torch.from_numpy(np.array(value)) for name, value in read_checkpoint(directory).items()}
    known = model.state_dict()
    model.load_state_dict({name: value for name, value in weights.items() if name in known}, strict=True)
    with torch.inference_mode():
        return model.to(dtype)(torch.tensor([TEXT]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", few(NAMES, fast=["gptqmodel-g4act"]))
def test_logits(name: str, checkpoints: Path) -> None:
    """Expanded in bfloat16 as near to float32 as transformers is on the same values; packed by the CPU library, whose
    activations have 8 bits, near to it."""
    path, source = checkpoints / name, checkpoints / "source-bf16"
    exact = transformers_logits(path, source, torch.float32)
    theirs = transformers_logits(path, source, torch.bfloat16)
    with kernels.reference_only():
        ours = logits(load(config_for(path, dtype="bfloat16", attention_backend="torch"), CPU))
    assert error(ours, exact) < 1.5 * error(theirs, exact) + 2e-3
    if SETS:
        assert error(logits(load(config_for(path, dtype="bfloat16"), CPU)), exact) < 0.1


# What the library makes of each checkpoint: kind, group, and whether values are exact but for float16 scales.
KEPT_AS = {
    "autoawq-w4g128": ("q4", 32), "gptqmodel-g4": ("q4", 32), "gptqmodel-g4act": ("q4", 32), "gptqmodel-g8": ("q8", 32),
    "llmcompressor-fp8block": ("q8", 32), "llmcompressor-nvfp4": ("q6", 16), "llmcompressor-mxfp4": ("q6", 32),
    "bitsandbytes-nf4": ("q8", 32), "bitsandbytes-int8": ("q8", 32), "modelopt-int4awq": ("q4", 32),
}  # fmt: skip


@pytest.mark.skipif(not SETS, reason="no CPU library")
@pytest.mark.parametrize("name", KEPT_AS)
def test_the_library_keeps_the_numbers(name: str, checkpoints: Path, log_lines: list[str]) -> None:
    """Fused matrices are the parts' values: exact in bfloat16, but for 8-bit floats and NF4, which are rounded, as the
    log says."""
    values = read_checkpoint(checkpoints / name)
    model = load(config_for(checkpoints / name, dtype="bfloat16"), CPU)
    rounded = any(kind in name for kind in ("fp8", "nf4"))
    for layer in range(2):
        at, ours = f"model.layers.{layer}", model.model.layers[layer]
        for linear, parts in (
            (ours.attention.qkv, [f"self_attn.{part}_proj" for part in "qkv"]),
            (ours.attention.o, ["self_attn.o_proj"]),
            (ours.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (ours.mlp.down, ["mlp.down_proj"]),
        ):
            assert isinstance(linear, Linear)
            matrix = matrix_of(linear)
            assert (matrix.layout.format.kind, matrix.layout.format.group) == KEPT_AS[name]
            wanted = torch.from_numpy(np.concatenate([values[f"{at}.{part}.weight"] for part in parts]))
            found = matrix.rows(torch.arange(matrix.layout.outputs)).float()
            assert error(found, wanted) < (6e-3 if rounded else 2.5e-3)
    assert any("keeps the checkpoint's 8-bit floats" in line for line in log_lines) == rounded
    assert not any("expanded" in line for line in log_lines)


@pytest.mark.skipif(not SETS, reason="no CPU library")
def test_what_is_held_is_said(checkpoints: Path, log_lines: list[str]) -> None:
    """The log names each way of keeping weights with its bytes, and the bytes are those that the ledger counts."""
    model = load(config_for(checkpoints / "gptqmodel-g4", dtype="bfloat16"), CPU)
    (held,) = [line for line in log_lines if "matrices: " in line]
    assert "8 as 4-bit integers in groups of 32 (" in held and "2 as bfloat16 (0.5 MiB)" in held
    plain = load(config_for(checkpoints / "source-bf16", dtype="bfloat16"), CPU)
    assert model.weight_bytes() < 0.55 * plain.weight_bytes()


@pytest.mark.parametrize("name", few(NAMES, fast=["gptqmodel-g4asym", "llmcompressor-fp8block"]))
def test_halves_of_two_ranks_are_the_whole(name: str, checkpoints: Path) -> None:
    """Each rank's layers compute its share: columns of some, summed rows of others."""
    config = config_for(checkpoints / name, dtype="float32", attention_backend="torch")
    whole = load_model(config, CPU)
    ranks = [load_model(config, CPU, Mesh(rank, 2)) for rank in range(2)]
    x = torch.randn(3, 512)
    with torch.inference_mode(), kernels.reference_only():
        for layer in range(2):
            for place in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"):
                linear, shares = at(whole, layer, place), [at(rank, layer, place) for rank in ranks]
                inputs = linear.shape.inputs
                y = linear.method.apply(linear, x[:, :inputs])
                if place in ("attention.o", "mlp.down"):
                    parts = [s.method.apply(s, x[:, s.shape.own_inputs]) for s in shares]
                    torch.testing.assert_close(parts[0] + parts[1], y, rtol=1e-4, atol=1e-5)
                    continue
                for part in linear.shape.parts:
                    _, rows = linear.shape.place(part.name)
                    halves = []
                    for share in shares:
                        own, here = share.shape.place(part.name)
                        halves.append(share.method.apply(share, x[:, :inputs])[:, here])
                        assert own.num_own * 2 == part.outputs
                    torch.testing.assert_close(torch.cat(halves, 1), y[:, rows], rtol=1e-4, atol=1e-5)


def at(model: Any, layer: int, place: str) -> Linear:
    found = model.layers[layer].get_submodule(place)
    assert isinstance(found, Linear)
    return found


@pytest.mark.skipif(not SETS, reason="no CPU library")
@pytest.mark.parametrize("name", ["gptqmodel-g4asym", "gptqmodel-g4act", "llmcompressor-nvfp4", "modelopt-int4awq"])
def test_halves_in_the_library(name: str, checkpoints: Path) -> None:
    config = config_for(checkpoints / name, dtype="bfloat16")
    whole = load_model(config, CPU)
    for rank in range(2):
        share = load_model(config, CPU, Mesh(rank, 2))
        for place in ("attention.o", "mlp.down"):
            ours, theirs = at(share, 0, place), at(whole, 0, place)
            rows = torch.arange(ours.shape.num_own_outputs)
            own = matrix_of(theirs).rows(rows)[:, ours.shape.own_inputs]
            assert error(matrix_of(ours).rows(rows), own) < 2.5e-3


def test_they_serve(checkpoints: Path) -> None:
    with LLM(
        str(checkpoints / "gptqmodel-g4act"), device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False
    ) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": TEXT}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("name", ["llmcompressor-kvfp8", "llmcompressor-kvhead"])
def test_scales_of_an_8_bit_cache(name: str, checkpoints: Path, tmp_path: Path, log_lines: list[str]) -> None:
    """By layer and by head. Scales that are much too small make the cache overflow, so they are in use; one head's
    scale changes that head alone."""
    settings = {"dtype": "float32", "attention_backend": "torch"}

    def run(path: Path, kv: str) -> torch.Tensor:
        config = config_for(path, **settings, kv_cache_dtype=kv)
        model = load(config, CPU)
        dtype = torch.float8_e4m3fn if kv == "fp8" else torch.float32
        return PagedModel(model, kv_dtype=dtype).step({"text": TEXT})["text"]

    exact, near = run(checkpoints / name, "auto"), run(checkpoints / name, "fp8")
    assert 1e-4 < error(near, exact) < 0.15
    assert any(
        "4 scales from the checkpoint" in line and ("by head" in line) == (name.endswith("head")) for line in log_lines
    )
    tiny = {f"model.layers.0.self_attn.{which}_scale": lambda t: t * 1e-4 for which in "kv"}
    assert error(run(changed(checkpoints / name, tmp_path, tiny), "fp8"), exact) > 3 * error(near, exact)


@pytest.mark.parametrize("old", ["kv_scale", "output_scale"])
def test_scales_of_a_cache_under_old_names(old: str, checkpoints: Path, tmp_path: Path) -> None:
    copy = changed(checkpoints / "llmcompressor-kvfp8", tmp_path)
    with safe_open(copy / "model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    at, wanted = "model.layers.1.self_attn", {}
    for which in "kv":
        scale = tensors.pop(f"{at}.{which}_scale")
        wanted[which] = float(scale)
        tensors[f"{at}.{which}_proj.output_scale" if old == "output_scale" else f"{at}.kv_scale"] = scale
    save_file(tensors, copy / "model.safetensors")
    config = config_for(copy, dtype="float32", attention_backend="torch", kv_cache_dtype="fp8")
    attention = load(config, CPU).layers[1].attention
    assert attention.v_scale == wanted["v"] and attention.k_scale == wanted["v" if old == "kv_scale" else "k"]


# ---------------------------------------------------------------- what is refused


def changed(
    source: Path, place: Path, tensors: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A copy of a checkpoint with other tensors (None: removed) or another quantization config."""
    copy = shutil.copytree(source, place / "changed")
    if tensors:
        with safe_open(source / "model.safetensors", framework="pt") as file:
            kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        for name, change in tensors.items():
            value = change(kept.pop(name))
            if value is not None:
                kept[name] = value.contiguous()
        save_file(kept, copy / "model.safetensors")
    if config:
        whole = json.loads((copy / "config.json").read_text())
        whole["quantization_config"] |= config
        (copy / "config.json").write_text(json.dumps(whole))
    return copy


Q = "model.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None, str]] = {
    "method": ("gptqmodel-g4", None, {"quant_method": "quip"}, "quant_method 'quip'"),
    "bits": ("gptqmodel-g4", None, {"bits": 5}, "GPTQ with 5 bits"),
    "layout": ("autoawq-w4g128", None, {"version": "gemv"}, "AWQ in the layout 'gemv'"),
    "group": ("autoawq-w4g128", None, {"group_size": 96}, "groups of 96 do not divide"),
    "missing": ("gptqmodel-g4", {f"{Q}.scales": lambda t: None}, None, r"q_proj.scales is missing"),
    "shape": (
        "gptqmodel-g4",
        {f"{Q}.scales": lambda t: t[:1]},
        None,
        r"scales is \[1, 256\], but should be \[2, 256\]",
    ),
    "order": ("gptqmodel-g4act", {f"{Q}.g_idx": lambda t: t * 0}, None, "g_idx does not give each group 128"),
    "type": ("gptqmodel-g4", {f"{Q}.qweight": lambda t: t.float()}, None, "qweight is float32, but should be int32"),
    "nan": ("gptqmodel-g4", {f"{Q}.scales": lambda t: t * float("nan")}, None, "q_proj.weight .* not finite"),
    "fp8 nan": (
        "llmcompressor-fp8dyn",
        {f"{Q}.weight": lambda t: (t.view(torch.uint8) | 127).view(t.dtype)},
        None,
        "not finite",
    ),
    "scheme": (
        "llmcompressor-w8a8",
        None,
        {
            "config_groups": {
                "g": {"targets": ["Linear"], "format": "marlin-24", "weights": {"num_bits": 4, "strategy": "group"}}
            }
        },
        "compressed-tensors 'marlin-24'",
    ),
    "sparse": ("llmcompressor-w8a8", None, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "a rule's bits": ("gptqmodel-g4", None, {"dynamic": {".*q_proj": {"bits": 5}}}, "GPTQ with 5 bits"),
    "other layout": ("gptqmodel-g4", None, {"checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin'"),
    "algorithm": ("modelopt-fp8", None, {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    "no order": ("gptqmodel-g4act", {f"{Q}.g_idx": lambda t: None}, None, "g_idx is missing, though .* desc_act"),
    "no scale": ("llmcompressor-fp8dyn", {f"{Q}.weight_scale": lambda t: None}, None, "q_proj.weight .* float8_e4m3fn"),
    "no scales": ("llmcompressor-w8a8", {f"{Q}.weight_scale": lambda t: None}, None, "q_proj.weight .* is int8"),
    "half of the groups": (
        "llmcompressor-gptq_w4a16",
        {f"{Q}.weight_scale": lambda t: t[:, :1]},
        None,
        "1 scales a row are not those of groups of 128",
    ),
    "half of the rows": (
        "llmcompressor-gptq_w4a16",
        {f"{Q}.weight_scale": lambda t: t[:128]},
        None,
        r"\[128, 2\] scales do not fit a matrix of 256x256",
    ),
    "zero points": (
        "llmcompressor-gptq_w4a16_asym",
        {f"{Q}.weight_zero_point": lambda t: t[:, :1]},
        None,
        r"weight_zero_point is \[32, 1\], but should be \[32, 2\]",
    ),
    "whole scales": ("autoawq-w4g128", {f"{Q}.scales": lambda t: t.long()}, None, "scales is int64, .* of floats"),
    "flat": ("gptqmodel-g4", {f"{Q}.qweight": lambda t: t.flatten()}, None, r"qweight is \[8192\], .* a matrix"),
    "no shape": (
        "llmcompressor-w8a16",
        {f"{Q}.weight_shape": lambda t: t[:1]},
        None,
        r"weight_shape is \[1\], but should be \[2\]",
    ),
    "blocks": ("bitsandbytes-nf4", {f"{Q}.weight.absmax": lambda t: t[:-1]}, None, r"absmax is \[1023\]"),
    "blocks of blocks": (
        "bitsandbytes-nf4",
        {f"{Q}.weight.nested_absmax": lambda t: t[:2]},
        None,
        r"nested_absmax is \[2\]",
    ),
    "levels": ("bitsandbytes-nf4", {f"{Q}.weight.nested_quant_map": lambda t: t[:9]}, None, r"quant_map is \[9\]"),
    "quantized twice": (
        "bitsandbytes-nf4",
        {f"{Q}.weight.absmax": lambda t: t.float()},
        None,
        "weight.absmax is float32, but should be uint8",
    ),
    "factor": (
        "llmcompressor-nvfp4a16",
        {f"{Q}.weight_global_scale": lambda t: t * float("inf")},
        None,
        "weight_global_scale is inf, but should be positive and finite",
    ),
    "half of the blocks": (
        "llmcompressor-fp8block",
        {f"{Q}.weight_scale": lambda t: t[:1]},
        None,
        r"its scales are \[1, 2\], but blocks of 128x128 need \[2, 2\]",
    ),
    "half of a matrix": (
        "llmcompressor-w8a8",
        {f"{Q}.weight": lambda t: t[:, :128]},
        None,
        r"is \[256, 128\], but should",
    ),
    "awq groups": ("modelopt-int4awq", {f"{Q}.weight_scale": lambda t: t[:, :1]}, None, r"weight_scale is \[256, 1\]"),
    "not listed": ("llmcompressor-w8a8", None, {"ignore": ["lm_head", "re:.*q_proj"]}, "says that it is not quantized"),
    "state": (
        "bitsandbytes-nf4",
        {f"{Q}.weight.quant_state.bitsandbytes__nf4": lambda t: t[:9]},
        None,
        "quant_state cannot be read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, checkpoints: Path, tmp_path: Path) -> None:
    name, tensors, config, message = FAULTS[fault]
    path = changed(checkpoints / name, tmp_path, tensors, config)
    with pytest.raises(ModelError, match=message) as raised:
        load(config_for(path, dtype="bfloat16"), CPU)
    assert any(hint in str(raised.value) for hint in ("Use ", "ownload", "Quantize", "repair")), "it says what to do"


def test_a_lost_config_is_named(checkpoints: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoints / "gptqmodel-g4", tmp_path / "copy", ignore=lambda *_: ["quantize_config.json"])
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantized, but config.json has no quantization_config; download it again"):
        load(config_for(copy, dtype="bfloat16"), CPU)


def test_quantizing_twice_is_refused(checkpoints: Path) -> None:
    with pytest.raises(KvasirError, match="already quantized"):
        config_for(checkpoints / "gptqmodel-g4", quantization="int8")
    assert config_for(checkpoints / "gptqmodel-g4", quantization="gptq").model.quantization == "gptq"
    with pytest.raises(KvasirError, match="quantization='awq'.* is gptq"):
        config_for(checkpoints / "gptqmodel-g4", quantization="awq")
