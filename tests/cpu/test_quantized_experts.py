"""Experts of quantized checkpoints, in the layouts of the models that have them, against transformers on what numpy
reads from the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.errors import ModelError
from kvasir.layers.mesh import Mesh
from kvasir.models import loader
from kvasir.models.loader import load, load_model
from kvasir.quantization.coded_linear import CodedMethods
from tests.format_writers import compress, pack_bits
from tests.model_builders import PagedModel, make_hf_model
from tests.native_builders import SETS, require_library
from tests.numpy_formats import E2M1
from tests.pairwise import each_once

CPU = torch.device("cpu")
TEXT = np.random.default_rng(1).integers(2, 90, 23).tolist()
WIDE = {"hidden_size": 64, "intermediate_size": 96}
EXACT = {"dtype": "float32", "attention_backend": "torch"}


def config_for(path: Path, **settings: Any) -> Any:
    return resolve(EngineArgs(str(path), device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False, **settings))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def transformers_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0].float()
        return logits


def our_logits(path: Path, **settings: Any) -> torch.Tensor:
    paged = PagedModel(load(config_for(path, **settings), CPU))
    parts = [paged.step({"text": TEXT[:13]})["text"], paged.step({"text": TEXT[13:22]})["text"]]
    return torch.cat([*parts, paged.step({"text": TEXT[22:]})["text"]])


# ---------------------------------------------------------------- experts one by one, and a latent cache

SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16},
    "deepseek_v3": {
        **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 32},
        **{"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
    "glm4_moe": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16},
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
COMPRESSED: dict[str, dict[str, Any]] = {
    "pack-quantized": INT4,
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}
FORMATS = ["gptq", "awq", "fp8", *COMPRESSED]


def written(form: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix's tensors in a format, and their values."""
    outputs, inputs = weight.shape
    if form in COMPRESSED:
        weights, tensors = COMPRESSED[form], {"weight": weight.float()}
        groups = weight.float().view(outputs, -1, 32 if form == "pack-quantized" else inputs)
        span = groups.amax(2) - groups.amin(2) if form == "pack-quantized" else 2 * groups.abs().amax(2)
        most = {"pack-quantized": 15, "int-quantized": 254, "float-quantized": 896}[form]
        tensors["weight_scale"] = (span / most).bfloat16().float()
        if form == "pack-quantized":
            low = -8 - groups.amin(2) / tensors["weight_scale"]
            tensors["weight_zero_point"] = low.round().clamp(-8, 7).to(torch.int8)
        return compress(form, weights, tensors)
    if form == "fp8":
        tall = torch.nn.functional.pad(weight.float(), (0, 0, 0, -outputs % 16)).view(-1, 16, inputs // 32, 32)
        scale = (tall.abs().amax((1, 3)) / 448).bfloat16().float()
        spread = scale.repeat_interleave(16, 0)[:outputs].repeat_interleave(32, 1)
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread
    groups = weight.float().view(outputs, -1, 32)
    scale = ((groups.amax(2) - groups.amin(2)) / 15).half().float()
    zero = (-groups.amin(2) / scale).round().clamp(1, 15)
    numbers = (groups / scale[..., None]).round().add(zero[..., None]).clamp(0, 15)
    values = ((numbers - zero[..., None]) * scale[..., None]).view(outputs, inputs)
    codes, zeros = numbers.view(outputs, inputs).T.numpy(), zero.T.numpy()
    if form == "gptq":
        tensors = {"qweight": pack_bits(codes, 4, 0), "qzeros": pack_bits(zeros - 1, 4, 1)}
    else:
        mixed = np.arange(outputs).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        tensors = {"qweight": pack_bits(codes[:, mixed], 4, 1), "qzeros": pack_bits(zeros[:, mixed], 4, 1)}
    return {**tensors, "scales": scale.half().T.contiguous()}, values


def config_of(form: str) -> dict[str, Any]:
    if form in COMPRESSED:
        groups = {"group_0": {"targets": ["Linear"], "weights": COMPRESSED[form]}}
        return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    if form == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
    layout = {"checkpoint_format": "gptq", "desc_act": False} if form == "gptq" else {"version": "gemm"}
    return {"quant_method": form, "bits": 4, "group_size": 32, **layout}


def quantized_copy(name: str, form: str, place: Path) -> Path:
    """A checkpoint in the directory `quantized`, and in `plain` the same values."""
    model = make_hf_model(name, **SMALL[name])
    for copy in ("plain", "quantized"):
        model.save_pretrained(place / copy)
    tensors, coded, values = load_file(place / "plain" / "model.safetensors"), {}, {}
    for key in [key for key in tensors if key.endswith(".weight") and tensors[key].dim() == 2]:
        module = key.removesuffix(".weight")
        if not module.endswith(("gate", "lm_head", "embed_tokens")):  # routers
            parts, values[key] = written(form, tensors.pop(key))
            coded |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    assert any(".experts.1." in key for key in values), "experts are quantized"
    save_file({**tensors, **coded}, place / "quantized" / "model.safetensors", {"format": "pt"})
    save_file({**tensors, **values}, place / "plain" / "model.safetensors", {"format": "pt"})
    write_config(place / "quantized", config_of(form))
    return place


CASES = each_once(list(SMALL), FORMATS)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_experts_one_by_one(name: str, form: str, tmp_path: Path, log_lines: list[str]) -> None:
    """In float32 what transformers computes from the values; the library keeps codes, and rounds activations."""
    from transformers import AutoModelForCausalLM

    place = quantized_copy(name, form, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(place / "plain", dtype=torch.float32).eval()
    wanted = transformers_logits(theirs)
    torch.testing.assert_close(our_logits(place / "quantized", **EXACT), wanted, rtol=1e-4, atol=1e-4)
    if SETS:
        del log_lines[:]
        got = our_logits(place / "quantized", dtype="bfloat16")
        assert not any("expanded" in line for line in log_lines)
        near = sorted(error(one, other) for one, other in zip(got, wanted, strict=True))
        assert near[len(near) // 2] < 0.1


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_mixtral_under_the_names_of_transformers_5(block: str, tmp_path: Path) -> None:
    """As llm-compressor and GPTQModel write its experts now."""
    place = quantized_copy("mixtral", "gptq", tmp_path)
    wanted = our_logits(place / "quantized", **EXACT)
    renames = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.", "block_sparse_moe": block}
    tensors = {}
    for name, tensor in load_file(place / "quantized" / "model.safetensors").items():
        for old, new in renames.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, place / "quantized" / "model.safetensors", {"format": "pt"})
    assert torch.equal(our_logits(place / "quantized", **EXACT), wanted)


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe"])
def test_stacked_experts_one_by_one(name: str, tmp_path: Path) -> None:
    """Tools that quantize take apart what the model's own checkpoint has in one tensor."""
    make_hf_model(name, **WIDE).save_pretrained(tmp_path)
    wanted, tensors = our_logits(tmp_path, **EXACT), load_file(tmp_path / "model.safetensors")
    for both, down in [(key, key.replace("gate_up_proj", "down_proj")) for key in tensors if "gate_up_proj" in key] + [
        (key, key.replace("input", "output")) for key in tensors if "input_linear" in key
    ]:
        stacks = tensors.pop(both), tensors.pop(down)
        if name == "gpt_oss":  # a row of the gate, then one of up; inputs come first
            at, end = both.split(".gate_up_proj")[0], "bias" if both.endswith("bias") else "weight"
            parts = (stacks[0][..., ::2], stacks[0][..., 1::2], stacks[1])
            parts = parts if end == "bias" else tuple(part.transpose(1, 2) for part in parts)
        else:
            at, end, parts = (
                both.replace("input_linear.weight", "experts"),
                "weight",
                (*stacks[0].chunk(2, 1), stacks[1]),
            )
        for part, of_experts in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            for expert, tensor in enumerate(of_experts):
                tensors[f"{at}.{expert}.{part}.{end}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(our_logits(tmp_path, **EXACT), wanted)


# ---------------------------------------------------------------- gpt-oss


def mxfp4(values: Any) -> tuple[Any, Any, Any]:
    """[..., inputs] -> blocks [..., groups, 16], scales [..., groups] and the values they stand for."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    codes = np.abs(groups[..., None] / np.exp2(exponents)[..., None, None] - E2M1).argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    stood_for = (E2M1[codes] * np.exp2(exponents)[..., None]).reshape(values.shape)
    return blocks, (exponents + 127).astype(np.uint8), stood_for


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The checkpoint, and transformers' logits with the values of its experts."""
    place = tmp_path_factory.mktemp("gpt_oss")
    # Older transformers clamp at 7.0 whatever the configuration says.
    model = make_hf_model("gpt_oss", **WIDE, swiglu_limit=7.0)
    model.save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, values = mxfp4(tensors.pop(name).transpose(1, 2).numpy())  # experts, outputs, inputs
        for part, values_of in (("blocks", blocks), ("scales", scales)):
            tensors[f"{name}_{part}"] = torch.from_numpy(values_of).contiguous()
        state[name].copy_(torch.from_numpy(values).transpose(1, 2))
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    write_config(
        place,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    )
    return place, transformers_logits(model)


def write_config(place: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def test_gpt_oss(gpt_oss: tuple[Path, torch.Tensor]) -> None:
    path, wanted = gpt_oss
    assert config_for(path, quantization="mxfp4").model.quantization == "mxfp4"
    torch.testing.assert_close(our_logits(path, **EXACT), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not SETS, reason="no CPU library")
def test_gpt_oss_in_the_library(gpt_oss: tuple[Path, torch.Tensor], log_lines: list[str]) -> None:
    """Its 4-bit floats are kept exactly, in 6 bits; activations have 8 bits."""
    path, wanted = gpt_oss
    model = load(config_for(path, dtype="bfloat16"), CPU)
    assert any("8 as 6-bit integers in groups of 32" in line for line in log_lines)
    assert not any("expanded" in line for line in log_lines)
    tensors = load_file(path / "model.safetensors")
    for layer in range(4):
        experts = model.model.layers[layer].mlp.experts
        for stack, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            parts = [tensors[f"{at}_{part}"].numpy() for part in ("blocks", "scales")]
            codes = np.stack([parts[0] & 15, parts[0] >> 4], -1).reshape(*parts[1].shape, 32)
            values = E2M1[codes] * np.exp2(parts[1].astype(np.float32) - 127)[..., None]
            rows = torch.from_numpy(values.reshape(*values.shape[:2], -1))
            if stack == "gate_up":  # alternating in the checkpoint
                rows = torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
            kept = experts.stacks[stack]
            every = torch.arange(kept.layout.outputs)
            for number in range(6):
                assert torch.equal(kept.matrix(number).rows(every).float(), rows[number])
    paged = PagedModel(model)
    got = paged.step({"text": TEXT})["text"]
    near = sorted(error(one, other) for one, other in zip(got, wanted, strict=True))
    assert near[len(near) // 2] < 0.05  # of the tokens: where two experts are nearly as good, one may go to either


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of a GPU, on a CPU by their reference."""
    monkeypatch.setattr(loader, "ExpandedMethods", CodedMethods)


def test_gpt_oss_by_the_methods_of_a_gpu(gpt_oss: tuple[Path, torch.Tensor], coded: None, log_lines: list[str]) -> None:
    path, wanted = gpt_oss
    torch.testing.assert_close(our_logits(path, **EXACT), wanted, rtol=1e-4, atol=1e-4)
    assert any("8 as e2m1 in groups of 32" in line for line in log_lines)
    assert not any("expanded" in line for line in log_lines)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_experts_one_by_one_by_the_methods_of_a_gpu(
    name: str, form: str, coded: None, tmp_path: Path, log_lines: list[str]
) -> None:
    place = quantized_copy(name, form, tmp_path)
    wanted = our_logits(place / "plain", **EXACT)
    got = our_logits(place / "quantized", **EXACT)
    expanded = [line for line in log_lines if "expanded" in line]
    assert all("latent_up is expanded: its layer computes with values" in line for line in expanded)
    # Minima and scales of groups of 32 are rounded to float16.
    assert error(got, wanted) < (5e-3 if form in ("gptq", "awq", "pack-quantized") else 1e-5)


def test_gpt_oss_damaged(gpt_oss: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path, _ = gpt_oss
    name = "model.layers.0.mlp.experts.down_proj"
    for part, change, message in (
        ("scales", None, f"{name}_scales is missing"),
        ("scales", lambda t: t[:, :9], "scales is .* but should be"),
        ("blocks", lambda t: t.flatten(2), r"blocks is .* but should be \[experts"),
        ("blocks", lambda t: t[..., :8], "blocks is .* but should be"),
        ("blocks", lambda t: t.float(), "blocks is float32, but should be uint8"),
        ("scales", lambda t: t | 255, "not finite"),
    ):
        tensors = load_file(path / "model.safetensors")
        whole = tensors.pop(f"{name}_{part}")
        if change is not None:
            tensors[f"{name}_{part}"] = change(whole).contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        with pytest.raises(ModelError, match=message):
            load(config_for(tmp_path, **EXACT), CPU)


def test_gpt_oss_with_random_weights(gpt_oss: tuple[Path, torch.Tensor], log_lines: list[str]) -> None:
    """They have the checkpoint's kind of numbers."""
    path, _ = gpt_oss
    model = load(config_for(path, dtype="bfloat16", load_format="dummy"), CPU)
    assert any("8 as 6-bit integers in groups of 32" in line for line in log_lines) == bool(SETS)
    assert PagedModel(model).step({"text": TEXT})["text"].isfinite().all()


def test_halves_of_two_ranks_are_the_whole(gpt_oss: tuple[Path, torch.Tensor]) -> None:
    """In the library; a cut through a group of 32 is expanded."""
    require_library()
    config = config_for(gpt_oss[0], dtype="bfloat16")
    whole = load_model(config, CPU).layers[0].mlp.experts
    x, weights, chosen = torch.randn(7, 64).bfloat16(), torch.rand(7, 3), torch.randint(0, 6, (7, 3))
    wanted = whole.method.apply(whole, x, weights, chosen, whole.activation)
    for apart in (False, True):
        shares = [load_model(config, CPU, Mesh(rank, 2, whole_experts=apart)).layers[0].mlp.experts for rank in (0, 1)]
        got = torch.zeros(7, 64)
        for rank, share in enumerate(shares):
            own, theirs = chosen - 3 * rank, weights
            if apart:
                here = (own >= 0) & (own < 3)
                own, theirs = torch.where(here, own, 3), torch.where(here, weights, 0)
            got += share.method.apply(share, x, theirs, own if apart else chosen, share.activation).float()
        assert error(got, wanted) < 0.02, apart
