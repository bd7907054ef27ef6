"""Variants of quantized checkpoints that tools write and that the archive does not have: other packings, other names,
configs in other places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.config.quantized import quantization_of
from kvasir.config.resolve import read_hf_config
from kvasir.errors import ModelError
from kvasir.models.loader import load
from kvasir.quantization.formats import find_format
from tests.cpu.test_quantization_schemes import INPUTS, MODULE, OUTPUTS, decode, gptq_tensors, scheme_for
from tests.cpu.test_quantized_experts import EXACT, config_for, our_logits, quantized_copy
from tests.format_writers import pack_bits
from tests.numpy_formats import E2M1, E4M3

RNG = np.random.default_rng(2)


def codes_of(shape: tuple[int, ...], below: int) -> Any:
    return RNG.integers(0, below, shape).astype(np.uint8)


def e4m3(codes: Any) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def in_pairs(codes: Any) -> torch.Tensor:
    """Two codes in a byte, the first in its low half."""
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


# ---------------------------------------------------------------- GPTQ and AutoRound


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_0_in_version_1(bits: int) -> None:
    """Of 2, 4 and 8 bits GPTQModel subtracts ones from whole words, which borrow; of 3 from each number."""
    _, tensors = gptq_tensors(bits, 32, False, 0)
    zeros = RNG.integers(0, 1 << bits, (INPUTS // 32, OUTPUTS))
    zeros[:, ::3] = 0
    if bits == 3:
        tensors["qzeros"] = pack_bits((zeros - 1) % 8, 3, 1)
    else:
        words, ones = pack_bits(zeros, bits, 1).numpy().view(np.uint32), sum(1 << at for at in range(0, 32, bits))
        tensors["qzeros"] = torch.from_numpy((words - np.uint32(ones)).view(np.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False}
    got = decode(config, tensors)
    assert got.minimum is not None
    first = decode({**config, "checkpoint_format": "gptq_v2"}, {**tensors, "qzeros": pack_bits(zeros, bits, 1)})
    assert torch.equal(got.expand(), first.expand())


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel"])
@pytest.mark.parametrize("bits", [2, 4])
def test_packings_of_auto_round_with_plain_zero_points(packing: str, bits: int) -> None:
    wanted, tensors = gptq_tensors(bits, 64, False, 0)
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 64, "sym": False, "packing_format": packing}
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)


def test_small_floats_of_auto_round() -> None:
    config = {"quant_method": "auto-round", "data_type": "mx_fp", "group_size": 32}
    config["packing_format"] = "auto_round:llm_compressor"
    codes, exponents = codes_of((OUTPUTS, INPUTS), 16), codes_of((OUTPUTS, INPUTS // 32), 20) + 110
    spread = np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, 1)
    tensors = {"weight_packed": in_pairs(codes), "weight_scale": torch.from_numpy(exponents)}
    assert np.array_equal(decode({**config, "bits": 4}, tensors).expand().numpy(), E2M1[codes] * spread)
    codes = codes_of((OUTPUTS, INPUTS), 127)
    tensors = {"weight": e4m3(codes), "weight_scale": torch.from_numpy(exponents)}
    assert np.array_equal(decode({**config, "bits": 8}, tensors).expand().numpy(), E4M3[codes] * spread)
    scheme = scheme_for({**config, "data_type": "nv_fp", "bits": 4, "group_size": 16})
    assert scheme is not None and "weight_global_scale" in scheme.needs
    config |= {"data_type": "fp", "bits": 8, "group_size": [32, 64], "weight_block_size": [32, 64]}
    config["packing_format"] = "auto_round:fp8"
    scales = RNG.uniform(0.5, 1, (OUTPUTS // 32, INPUTS // 64)).astype(np.float32)
    tensors = {"weight": e4m3(codes), "weight_scale_inv": torch.from_numpy(scales)}
    wanted = E4M3[codes] * np.repeat(np.repeat(scales, 32, 0), 64, 1)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)


def test_blocks_and_refusals_of_auto_round() -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq"}
    for blocks in ("model.layers, model.more", [["model.layers.0", "model.layers.1"]], ["model.layers"]):
        named = {**config, "to_quant_block_names": blocks}
        assert scheme_for(named) is not None and scheme_for(named, "lm_head") is None
    with pytest.raises(ModelError, match="rotation_config"):
        scheme_for({**config, "rotation_config": {"hadamard_type": "hadamard"}})
    with pytest.raises(ModelError, match="4 bits of the type 'mx_int' in the packing 'auto_round'"):
        scheme_for({**config, "packing_format": "auto_round", "data_type": "mx_int"})


@pytest.mark.parametrize(
    ("change", "message"), [({"pack_dtype": "int8"}, "int8"), ({"is_marlin_format": True}, "marlin")]
)
def test_other_packings_of_gptq_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        scheme_for({"quant_method": "gptq", "bits": 4, "group_size": 64, **change})


def test_biases_of_zeros(tmp_path: Path) -> None:
    """AutoGPTQ gave every matrix a bias, also in models without any. One that is not zero is refused."""
    file = quantized_copy("mixtral", "gptq", tmp_path) / "quantized" / "model.safetensors"
    wanted, tensors = our_logits(file.parent, **EXACT), load_file(file)
    name = "model.layers.0.self_attn.o_proj.bias"
    tensors[name] = torch.zeros(64, dtype=torch.float16)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(our_logits(file.parent, **EXACT), wanted)
    tensors[name][3] = 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"no place in the model \(model.layers.0.self_attn.o_proj.bias\)"):
        load(config_for(file.parent, **EXACT), torch.device("cpu"))


# ---------------------------------------------------------------- ModelOpt and compressed-tensors


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


@pytest.mark.parametrize("algorithm", ["W8A16", "W8A8_SQ_PER_CHANNEL"])
def test_integers_of_modelopt(algorithm: str) -> None:
    whole = RNG.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8)
    scales, column = (RNG.uniform(0.5, 1, size).astype(np.float32) for size in (OUTPUTS, INPUTS))
    tensors = {"weight": torch.from_numpy(whole), "weight_scale": torch.from_numpy(scales)}
    wanted = whole * scales[:, None]
    assert np.array_equal(decode(modelopt(algorithm), tensors).expand().numpy(), wanted)
    tensors["pre_quant_scale"] = torch.from_numpy(column)
    assert np.array_equal(decode(modelopt(algorithm), tensors).expand().numpy(), wanted * column)
    scheme = scheme_for(modelopt(algorithm))
    assert scheme is not None
    with pytest.raises(ModelError, match=r"pre_quant_scale is \[3\], but should be \[256\]"):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        scheme.shape(MODULE, {**shapes, "pre_quant_scale": (3,)}, lambda name: tensors[name])


def test_nvfp4_of_modelopt_with_factors_of_inputs() -> None:
    codes, scales = codes_of((OUTPUTS, INPUTS), 16), codes_of((OUTPUTS, INPUTS // 16), 100)
    column = RNG.uniform(0.5, 1, INPUTS).astype(np.float32)
    tensors = {"weight": in_pairs(codes), "weight_scale": e4m3(scales), "weight_scale_2": torch.tensor(0.5)}
    tensors["pre_quant_scale"] = torch.from_numpy(column)
    wanted = E2M1[codes] * np.repeat(E4M3[scales] * np.float32(0.5), 16, 1) * column
    assert np.array_equal(decode(modelopt("NVFP4_AWQ", group_size=16), tensors).expand().numpy(), wanted)


def test_floats_of_modelopt() -> None:
    """In blocks, whose scales have four dimensions and whose name is in small letters; in groups with powers of two."""
    codes, exponents = codes_of((OUTPUTS, INPUTS), 127), codes_of((OUTPUTS, INPUTS // 32), 20) + 110
    scales = RNG.uniform(0.5, 1, (1, 2)).astype(np.float32)
    tensors = {"weight": e4m3(codes), "weight_scale": torch.from_numpy(scales[:, None, :, None])}
    wanted = E4M3[codes] * np.repeat(scales, 128, 1)
    assert np.array_equal(decode(modelopt("fp8_pb_wo"), tensors).expand().numpy(), wanted)
    spread = np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, 1)
    tensors = {"weight": e4m3(codes), "weight_scale": torch.from_numpy(exponents)}
    assert np.array_equal(decode(modelopt("MXFP8"), tensors).expand().numpy(), E4M3[codes] * spread)
    codes = codes_of((OUTPUTS, INPUTS), 16)
    tensors = {"weight": in_pairs(codes), "weight_scale": torch.from_numpy(exponents)}
    assert np.array_equal(decode(modelopt("mxfp4"), tensors).expand().numpy(), E2M1[codes] * spread)


def test_mxfp8_and_embeddings_of_compressed_tensors() -> None:
    eight = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    groups = {
        "a": {"targets": ["Linear"], "weights": eight, "format": "mxfp8-quantized"},
        "b": {"targets": ["Embedding"], "weights": four, "format": "pack-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "sparsity_config": {}}
    codes, exponents = codes_of((OUTPUTS, INPUTS), 127), codes_of((OUTPUTS, INPUTS // 32), 20) + 110
    tensors = {"weight": e4m3(codes), "weight_scale": torch.from_numpy(exponents)}
    wanted = E4M3[codes] * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, 1)
    assert np.array_equal(decode(config, tensors).expand().numpy(), wanted)
    embedding = scheme_for(config, "model.embed_tokens")
    assert embedding is not None and "weight_packed" in embedding.needs


@pytest.mark.parametrize("inputs", [96, 160, 64])
def test_last_blocks_with_fewer_inputs(inputs: int) -> None:
    """The scales of 128x128 blocks are rounded up, as DeepSeek's own code does."""
    codes, count = codes_of((OUTPUTS, inputs), 127), -(-inputs // 128)
    scales = RNG.uniform(0.5, 1, (1, count)).astype(np.float32)
    tensors = {"weight": e4m3(codes), "weight_scale_inv": torch.from_numpy(scales)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    scheme = scheme_for(config)
    assert scheme is not None
    coded = scheme.decode(MODULE, tensors)
    assert np.array_equal(coded.expand().numpy(), E4M3[codes] * np.repeat(scales, 128, 1)[:, :inputs])
    assert coded.coding.group == {96: 32, 160: 32, 64: 64}[inputs]
    with pytest.raises(ModelError, match="has 72 inputs, which blocks of 128 do not divide"):
        scheme.decode(MODULE, {**tensors, "weight": e4m3(codes_of((OUTPUTS, 72), 127))})


# ---------------------------------------------------------------- where configs are


def test_fbgemm_is_fp8_by_row() -> None:
    codes, scales = codes_of((OUTPUTS, INPUTS), 127), RNG.uniform(0.5, 1, (OUTPUTS, 1)).astype(np.float32)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    tensors = {"weight": e4m3(codes), "weight_scale": torch.from_numpy(scales)}
    coded = decode(config, tensors)
    assert np.array_equal(coded.expand().numpy(), E4M3[codes] * scales) and coded.coding.inputs == "e4m3"
    scheme = scheme_for(config)
    assert scheme is not None and "input_scale_ub" in scheme.unused and scheme_for(config, "lm_head") is None


@pytest.mark.parametrize(
    ("file", "config", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 64, "quant_method": "awq", "format": "gemm"}, "awq"),
    ],
)
def test_configs_beside_config_json(file: str, config: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps(config))
    form = find_format({}, tmp_path)
    assert form is not None and form.name == name and form.scheme(MODULE) is not None
    assert find_format({"quantization_config": {"quant_method": "fp8"}}, tmp_path).name == "fp8"  # type: ignore[union-attr]
    (tmp_path / file).write_text("[]")
    with pytest.raises(ModelError, match=f"{file} is not readable JSON"):
        find_format({}, tmp_path)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"bits": 4}, "unknown"),
    ],
)
def test_names_of_formats(config: dict[str, Any], name: str) -> None:
    found = quantization_of({"quantization_config": config}, Path("nowhere"))
    assert found is not None and found["quant_method"] == name


def test_models_with_a_part_for_text_keep_the_config(tmp_path: Path) -> None:
    """It stands beside `text_config`."""
    config = {"quantization_config": {"quant_method": "fp8"}, "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path, {})["quantization_config"] == {"quant_method": "fp8"}
