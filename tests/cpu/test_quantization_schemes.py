"""Schemes that no checkpoint of the archive has, against tensors that numpy packs as the formats are described; and
that a wrong reading of any would be found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ModelError
from kvasir.kernels.reference import LEVELS
from kvasir.quantization.coded import Coded, Coding, stacked
from kvasir.quantization.formats import find_format, integers
from kvasir.quantization.formats.base import Scheme
from tests.format_writers import compress, pack_bits
from tests.numpy_formats import E4M3

OUTPUTS, INPUTS = 64, 256
RNG = np.random.default_rng(0)
MODULE = "model.layers.0.mlp.down_proj"


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
    monkeypatch.setattr(integers, "GPTQScheme", lambda bits, group, shift, ordered: make(bits, group, 0, ordered))
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


# ---------------------------------------------------------------- compressed-tensors, written by its own package


STRATEGIES = {"tensor": (1, 1), "channel": (OUTPUTS, 1), "group": (OUTPUTS, 8), "block": (2, 4)}
BLOCK = {"block_structure": [32, 64]}


def parameters(strategy: str, bits: int, symmetric: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A scheme, a matrix, and scales and zero points of that strategy."""
    shape = STRATEGIES[strategy] if strategy != "tensor" else (1,)
    torch.manual_seed(bits)
    tensors = {
        "weight": torch.randn(OUTPUTS, INPUTS),
        "weight_scale": (torch.rand(shape) * 0.2 + 0.1).bfloat16().float(),
    }
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    weights |= {"group_size": 32} if strategy == "group" else BLOCK if strategy == "block" else {}
    if not symmetric:
        half = 1 << (bits - 1)
        tensors["weight_zero_point"] = torch.randint(-half, half, shape).to(torch.int8)
    return weights, tensors


def decoded(form: str, weights: dict[str, Any], written: dict[str, torch.Tensor]) -> torch.Tensor:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return decode(config, written).expand()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_packed_integers_of_every_width(strategy: str, bits: int, symmetric: bool) -> None:
    """Numbers of 3, 5, 6 and 7 bits cross words."""
    weights, tensors = parameters(strategy, bits, symmetric)
    written, wanted = compress("pack-quantized", weights, tensors)
    assert torch.equal(decoded("pack-quantized", weights, written), wanted)


@pytest.mark.parametrize("bits", [3, 5])
def test_packed_integers_of_old_writers(bits: int) -> None:
    """Which left a word's last bits empty."""
    each = 32 // bits
    numbers = RNG.integers(0, 1 << bits, (OUTPUTS, INPUTS))
    zeros = RNG.integers(0, 1 << bits, (OUTPUTS, 8))
    scales = RNG.uniform(0.5, 1, (OUTPUTS, 8)).astype(np.float16).astype(np.float32)

    def words(values: Any) -> torch.Tensor:
        padded = np.pad(values, ((0, 0), (0, -values.shape[1] % each))).reshape(len(values), -1, each)
        return torch.from_numpy((padded << np.arange(each) * bits).sum(2).astype(np.uint32).view(np.int32))

    tensors = {
        "weight_packed": words(numbers),
        "weight_zero_point": words(zeros.T).T.contiguous(),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    wanted = (numbers - np.repeat(zeros, 32, 1)) * np.repeat(scales, 32, 1)
    assert np.array_equal(decoded("pack-quantized", weights, tensors).numpy(), wanted)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_of_a_byte(bits: int, strategy: str, symmetric: bool) -> None:
    weights, tensors = parameters(strategy, bits, symmetric)
    written, wanted = compress("int-quantized", weights, tensors)
    assert torch.equal(decoded("int-quantized", weights, written), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_floats_of_a_byte(strategy: str) -> None:
    weights, tensors = parameters(strategy, 8, True)
    weights["type"] = "float"
    written, wanted = compress("float-quantized", weights, tensors)
    assert torch.equal(decoded("float-quantized", weights, written), wanted)


def test_groups_in_an_order_of_their_own() -> None:
    """actorder=group: `weight_g_idx` says which group each input belongs to."""
    weights, _ = parameters("group", 4, True)
    which = torch.from_numpy(RNG.permutation(np.arange(INPUTS) // 32))
    numbers, scales = RNG.integers(-8, 8, (OUTPUTS, INPUTS)), RNG.uniform(0.5, 1, (OUTPUTS, 8)).astype(np.float32)
    tensors = {
        "weight_packed": pack_bits(numbers + 8, 4, 1),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        "weight_g_idx": which.int(),
    }
    wanted = numbers.astype(np.float32) * scales[:, which.numpy()]
    assert np.array_equal(decoded("pack-quantized", {**weights, "actorder": "group"}, tensors).numpy(), wanted)


# ---------------------------------------------------------------- other spellings


def test_awq_under_the_names_of_its_first_config(checkpoints_awq: tuple[Any, dict[str, Any]]) -> None:
    wanted, tensors = checkpoints_awq
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    assert np.array_equal(decode({**config, "zero_point": False}, tensors).expand().numpy(), wanted), "they are there"
    for change, message in (
        ({"version": "GEMV"}, "layout 'gemv'"),
        ({"version": "gemv_fast"}, "layout 'gemv_fast'"),
        ({"w_bit": 3}, "AWQ with 3 bits"),
    ):
        with pytest.raises(ModelError, match=message):
            scheme_for({**config, **change})


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_with_one_scale_has_either_name(name: str, shape: tuple[int, ...]) -> None:
    """Mistral's, for example, whose static scales of activations are `activation_scale`."""
    codes = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: torch.full(shape, 0.3)}
    assert np.array_equal(decode(config, tensors).expand().numpy(), E4M3[codes] * np.float32(0.3))
    scheme = scheme_for(config)
    assert scheme is not None and {"activation_scale", "input_scale"} <= set(scheme.unused)


def test_fp8_with_scales_of_powers_of_two() -> None:
    """DeepSeek's newer checkpoints store them as such (`scale_fmt` ue8m0)."""
    codes, exponents = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8), RNG.integers(100, 130, (1, 2))
    tensors = {
        "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.from_numpy(exponents.astype(np.uint8)).view(torch.float8_e8m0fnu),
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    wanted = E4M3[codes] * np.repeat(np.exp2(exponents - 127.0), 128, 1)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("packing", ["auto_gptq", "auto_awq", "llm_compressor", "fp8_static"])
def test_packings_of_auto_round(packing: str, checkpoints_awq: tuple[Any, dict[str, Any]]) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": f"auto_round:{packing}"}
    if packing == "auto_gptq":
        wanted, tensors = gptq_tensors(4, 64, False, 1)
        del tensors["g_idx"]
    elif packing == "auto_awq":
        wanted, tensors = checkpoints_awq
    elif packing == "llm_compressor":
        numbers, scales = RNG.integers(-8, 8, (OUTPUTS, INPUTS)), RNG.uniform(0.5, 1, (OUTPUTS, 4)).astype(np.float32)
        wanted = numbers.astype(np.float32) * np.repeat(scales, 64, 1)
        tensors = {
            "weight_packed": pack_bits(numbers + 8, 4, 1),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        }
    else:
        config |= {"bits": 8, "data_type": "fp", "group_size": -1}
        codes, scales = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8), RNG.uniform(0.5, 1, OUTPUTS)
        wanted = E4M3[codes] * scales.astype(np.float32)[:, None]
        tensors = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            "weight_scale": torch.from_numpy(scales.astype(np.float32)),
        }
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Nothing is in config.json."""
    codes = RNG.integers(0, 127, (OUTPUTS, INPUTS)).astype(np.uint8)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "model.layers.0.mlp.up*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inner}))
    form = find_format({}, tmp_path)
    assert form is not None and form.scheme("lm_head") is None and form.scheme("model.layers.0.mlp.up_proj") is None
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.3)}
    scheme = form.scheme(MODULE)
    assert scheme is not None
    assert np.array_equal(scheme.decode(MODULE, tensors).expand().numpy(), E4M3[codes] * np.float32(0.3))
    inner = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    only_cache = find_format({}, tmp_path)
    assert only_cache is not None and only_cache.scheme(MODULE) is None
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ModelError, match="not readable JSON"):
        find_format({}, tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_of_four_bits(kind: str, nested: bool) -> None:
    """High nibbles come first; scales may be quantized themselves, in blocks of 256 of them."""
    levels = np.array(LEVELS[kind], np.float32)
    codes = RNG.integers(0, 16, (OUTPUTS, INPUTS))
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [OUTPUTS, INPUTS]}
    flat = codes.reshape(-1).astype(np.uint8)
    tensors = {"weight": torch.from_numpy((flat[0::2] << 4 | flat[1::2])[:, None])}
    tensors["weight.quant_map"] = torch.from_numpy(levels)
    absmax = RNG.uniform(0.5, 1, OUTPUTS * INPUTS // 64).astype(np.float32)
    if nested:
        table = np.sort(RNG.uniform(-1, 1, 256)).astype(np.float32)
        numbers, outer = RNG.integers(0, 256, len(absmax)).astype(np.uint8), np.array([0.5], np.float32)
        tensors["weight.absmax"], tensors["weight.nested_quant_map"] = map(torch.from_numpy, (numbers, table))
        tensors["weight.nested_absmax"] = torch.from_numpy(outer)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        absmax = table[numbers] * outer[0] + np.float32(0.25)
    else:
        tensors["weight.absmax"] = torch.from_numpy(absmax)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    wanted = (levels[codes].reshape(-1, 64) * absmax[:, None]).reshape(OUTPUTS, INPUTS)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
