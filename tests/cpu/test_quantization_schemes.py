"""Schemes that no checkpoint of the archive has, against tensors that numpy packs as the formats are described; and
that a wrong reading of any would be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ModelError
from kvasir.quantization.coded import Coded, Coding, stacked
from kvasir.quantization.formats import find_format, integers
from kvasir.quantization.formats.base import Scheme
from tests.numpy_formats import E4M3

OUTPUTS, INPUTS = 64, 256
RNG = np.random.default_rng(0)
MODULE = "model.layers.0.mlp.down_proj"


def pack_bits(numbers: Any, bits: int, axis: int) -> torch.Tensor:
    """Numbers as one stream of bits, lowest first, in words of 32."""
    along = np.moveaxis(numbers, axis, -1).astype(np.uint8)
    stream = np.unpackbits(along[..., None], axis=-1, bitorder="little")[..., :bits].reshape(*along.shape[:-1], -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def scheme_for(config: dict[str, Any], module: str = MODULE) -> Scheme | None:
    form = find_format({"quantization_config": config}, Path("nowhere"))
    assert form is not None
    return form.scheme(module)


def decode(config: dict[str, Any], tensors: dict[str, torch.Tensor], module: str = MODULE) -> Coded:
    scheme = scheme_for(config, module)
    assert scheme is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    coded = scheme.decode(module, tensors)
    assert scheme.shape(module, shapes, lambda name: tensors[name]) == coded.shape == (OUTPUTS, INPUTS)
    assert torch.equal(coded.packed().expand(), coded.expand())
    return coded


def gptq_tensors(bits: int, group: int, symmetric: bool, plus: int, ordered: bool = True) -> tuple[Any, dict[str, Any]]:
    groups = INPUTS // group
    numbers = RNG.integers(0, 1 << bits, (INPUTS, OUTPUTS))
    zeros = np.full((groups, OUTPUTS), 1 << (bits - 1)) if symmetric else RNG.integers(1, 1 << bits, (groups, OUTPUTS))
    scales = RNG.uniform(0.5, 1, (groups, OUTPUTS)).astype(np.float16)
    which = np.arange(INPUTS) // group
    if not ordered:
        which = RNG.permutation(which)
    wanted = ((numbers - zeros[which]).astype(np.float32) * scales[which].astype(np.float32)).T
    tensors = {"qweight": pack_bits(numbers, bits, 0), "qzeros": pack_bits(zeros - plus, bits, 1)}
    return wanted, {**tensors, "scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(which.astype(np.int32))}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("form", "symmetric", "ordered"), [("gptq", True, True), ("gptq", False, False), ("gptq_v2", False, True)]
)
def test_gptq(bits: int, form: str, symmetric: bool, ordered: bool) -> None:
    wanted, tensors = gptq_tensors(bits, 32, symmetric, 0 if form == "gptq_v2" else 1, ordered)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "checkpoint_format": form,
        "desc_act": not ordered,
    }
    coded = decode(config, tensors)
    assert np.array_equal(coded.expand().numpy(), wanted)
    assert (coded.order is None) == ordered and (coded.minimum is None) == symmetric
    del tensors["g_idx"]  # old writers leave it out
    if ordered:
        assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)


def test_gptq_rules_of_modules() -> None:
    rules = {"-:.*up_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}, r"lm_head": {"bits": 2}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "dynamic": rules, "lm_head": True}
    assert scheme_for(config, "model.layers.3.mlp.up_proj") is None
    wanted, tensors = gptq_tensors(8, 64, True, 1)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    wanted, tensors = gptq_tensors(2, INPUTS, True, 1)
    assert np.array_equal(decode(config, tensors, "lm_head").expand().numpy(), wanted)
    wanted, tensors = gptq_tensors(4, INPUTS, False, 1)
    assert np.array_equal(decode(config, tensors, "model.layers.0.mlp.gate_proj").expand().numpy(), wanted)


def test_auto_round() -> None:
    wanted, tensors = gptq_tensors(4, 128, True, 1)
    del tensors["g_idx"]
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
    config["extra_config"] = {"lm_head": {"bits": 16}, "model.layers.1.mlp.down_proj": {"bits": 8}}
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    assert scheme_for(config, "lm_head") is None
    wanted, tensors = gptq_tensors(8, 128, True, 1)
    assert np.array_equal(decode(config, tensors, "model.layers.1.mlp.down_proj").expand().numpy(), wanted)
    with pytest.raises(ModelError, match="packing 'marlin'"):
        scheme_for({**config, "packing_format": "auto_round:marlin"})


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "weight_scale"])
def test_fp8_of_deepseek_and_qwen(scale_name: str) -> None:
    """Blocks of 128x128 whose scales multiply, where the last block has fewer outputs; or one scale."""
    codes = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8) | (
        RNG.integers(0, 2, (OUTPUTS, INPUTS)) << 7
    ).astype(np.uint8)
    block = [48, 128] if scale_name.endswith("inv") else None
    scales = RNG.uniform(0.1, 1, (2, 2)).astype(np.float32) if block else np.array(0.25, np.float32)
    spread = np.repeat(np.repeat(scales, 48, 0), 128, 1)[:OUTPUTS] if block else scales
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    config["modules_to_not_convert"] = ["lm_head", "model.layers.1"]
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), scale_name: torch.from_numpy(scales)}
    coded = decode(config, tensors)
    assert np.array_equal(coded.expand().numpy(), E4M3[codes] * spread)
    assert scheme_for(config, "model.layers.1.mlp.up_proj") is None and scheme_for(
        config, "model.layers.10.mlp.up_proj"
    )
    assert coded.coding.inputs == ("" if block else "e4m3")


def test_mixed_groups_of_compressed_tensors() -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "first": {"targets": ["Linear"], "weights": weights, "format": "int-quantized"},
            "second": {"targets": ["re:.*down_proj"], "weights": four, "format": "pack-quantized"},
        },
        "ignore": ["lm_head", "re:.*gate_proj"],
    }
    numbers, scales = RNG.integers(-8, 8, (OUTPUTS, INPUTS)), RNG.uniform(0.5, 1, (OUTPUTS, 4)).astype(np.float32)
    tensors = {
        "weight_packed": pack_bits(numbers + 8, 4, 1),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    assert np.array_equal(
        decode(config, tensors).expand().numpy(), numbers.astype(np.float32) * np.repeat(scales, 64, 1)
    )
    whole = RNG.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8)
    tensors = {"weight": torch.from_numpy(whole), "weight_scale": torch.from_numpy(scales[:, :1])}
    assert np.array_equal(decode(config, tensors, "model.layers.0.mlp.up_proj").expand().numpy(), whole * scales[:, :1])
    assert scheme_for(config, "lm_head") is None and scheme_for(config, "model.layers.0.mlp.gate_proj") is None


def test_modelopt_with_a_scheme_for_each_module() -> None:
    layers = {MODULE: {"quant_algo": "FP8"}, "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    codes = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8)
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.3)}
    assert np.array_equal(decode(config, tensors).expand().numpy(), E4M3[codes] * np.float32(0.3))
    assert scheme_for(config, "model.layers.0.mlp.gate_proj") is None
    assert scheme_for(config, "model.layers.0.mlp.up_proj").needs == ("weight", "weight_scale", "weight_scale_2")  # type: ignore[union-attr]


def test_stacking_matrices() -> None:
    """Those coded alike become one with their own scales; others stay apart."""
    make = lambda rows, scale, **how: Coded(  # noqa: E731
        torch.randint(0, 16, (rows, 64), dtype=torch.uint8), torch.full((rows, 1), scale), Coding("u4", 64, 8), **how
    )
    parts = [make(3, 0.5), make(5, 0.25)]
    whole = stacked(parts)
    assert whole is not None and torch.equal(whole.expand(), torch.cat([part.expand() for part in parts]))
    assert stacked([parts[0], make(2, 1.0, order=torch.randperm(64))]) is None
    assert stacked([parts[0], make(2, 1.0, minimum=torch.zeros(2, 1))]) is None


def test_cuts() -> None:
    coded = Coded(torch.randint(0, 16, (6, 128), dtype=torch.uint8), torch.rand(6, 4), Coding("u4", 32, 8))
    for one in (coded, coded.packed()):
        half = one.cut_columns(slice(64, 128))
        assert half is not None and torch.equal(half.expand(), coded.expand()[:, 64:])
        assert one.cut_columns(slice(48, 128)) is None, "it goes through a group"
        assert torch.equal(one.cut(slice(2, 5)).expand(), coded.expand()[2:5])
        assert torch.equal(one.take(torch.tensor([4, 0])).expand(), coded.expand()[[4, 0]])


# ---------------------------------------------------------------- mutations: each wrong reading fails a test above


def test_a_wrong_plus_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = integers.GPTQScheme
    monkeypatch.setattr(integers, "GPTQScheme", lambda bits, group, shift: make(bits, group, 0))
    with pytest.raises(AssertionError):
        test_gptq(4, "gptq", False, True)


def test_a_wrong_order_of_nibbles_is_found(
    monkeypatch: pytest.MonkeyPatch, checkpoints_awq: tuple[Any, dict[str, Any]]
) -> None:
    wanted, tensors = checkpoints_awq
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    monkeypatch.setattr(integers, "_NIBBLE", tuple(range(8)))
    assert not np.array_equal(decode(config, tensors).expand().numpy(), wanted)


@pytest.fixture
def checkpoints_awq() -> tuple[Any, dict[str, Any]]:
    numbers, zeros = RNG.integers(0, 16, (INPUTS, OUTPUTS)), RNG.integers(0, 16, (4, OUTPUTS))
    scales = RNG.uniform(0.5, 1, (4, OUTPUTS)).astype(np.float16)
    mixed = [0, 2, 4, 6, 1, 3, 5, 7]  # which output each nibble has, from the lowest
    order = np.arange(OUTPUTS).reshape(-1, 8)[:, mixed].reshape(-1)
    which = np.arange(INPUTS) // 64
    wanted = ((numbers - zeros[which]).astype(np.float32) * scales[which].astype(np.float32)).T
    tensors = {"qweight": pack_bits(numbers[:, order], 4, 1), "qzeros": pack_bits(zeros[:, order], 4, 1)}
    return wanted, {**tensors, "scales": torch.from_numpy(scales)}


def test_a_transposed_scale_is_found() -> None:
    """Of a square matrix with as many groups as outputs no shape tells; the values do."""
    wanted, tensors = gptq_tensors(4, 4, True, 1)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 4, "checkpoint_format": "gptq"}
    assert tensors["scales"].shape == (OUTPUTS, OUTPUTS)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    tensors["scales"] = tensors["scales"].T.contiguous()
    assert not np.array_equal(decode(config, tensors).expand().numpy(), wanted)
