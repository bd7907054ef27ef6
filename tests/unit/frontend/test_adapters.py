"""Reading adapters: what is wrong is an error that names the tensor, and identity is content. No torch, no model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir import LoRARequest
from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.errors import RequestError
from kvasir.lora.host import AdapterCatalog, AdapterError, AdapterNotFoundError, AdapterPlan, read_adapter
from kvasir.messages import AdapterTarget, AdapterTargets

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
MODULES = {Q: AdapterTarget("linear", 8, 6), K: AdapterTarget("linear", 4, 6)}
EXPERTS = "model.layers.1.mlp.experts"  # four, with inputs of 6 and 5
MODULES |= {
    EXPERTS: AdapterTarget("experts", 5, 6, num_experts=4),
    f"{EXPERTS}.2.up_proj": AdapterTarget("expert", 5, 6),
}
MODULES |= {"model.embed_tokens": AdapterTarget("embedding", 50, 6), "lm_head": AdapterTarget("head", 50, 6)}
TARGETS = AdapterTargets(MODULES, "model.", 6, 2, 4, True, max_rank=8, num_ranks=1)
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
PLAIN = {f"base_model.model.{Q}.lora_A.weight": (2, 6), f"base_model.model.{Q}.lora_B.weight": (8, 2)}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}


def write(path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], fill: float = 0.5) -> Path:
    """A safetensors file, written by hand."""
    header, data = {}, b""
    for name, shape in tensors.items():
        values = np.full(shape, fill, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def read(
    path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], task: int | None = None
) -> AdapterPlan:
    write(path, tensors, config)
    return read_adapter("mine", path, str(path), TARGETS, task).plan


def test_scales_follow_patterns_and_rank_stabilisation(tmp_path: Path) -> None:
    tensors = {**PLAIN, f"base_model.model.{K}.lora_A.weight": (4, 6), f"base_model.model.{K}.lora_B.weight": (4, 4)}
    config = {**LORA, "rank_pattern": {"layers.1.self_attn.k_proj": 4}, "alpha_pattern": {"q_proj": 10}}
    modules = read(tmp_path, tensors, config).modules
    assert (modules[Q].scale, modules[Q].rank, modules[K].scale, modules[K].rank) == (5.0, 2, 1.0, 4)
    assert read(tmp_path, tensors, {**config, "use_rslora": True}).modules[K].scale == 2.0
    plan = read(tmp_path, tensors, {**config, "init_lora_weights": "gaussian"})
    assert AdapterPlan.from_text(plan.text) == plan
    assert plan.text is plan.text  # all requests of an adapter share it


def test_adapters_of_all_experts_are_told_apart_by_shape(tmp_path: Path) -> None:
    """PEFT nests the adapters of two parameters of one module; which is inside depends on the order it met them in."""
    gate_up, down = [(8, 6), (10, 8)], [(8, 5), (6, 8)]
    for inner, outer in ((gate_up, down), (down, gate_up)):
        tensors = {}
        for middle, shapes in ((".base_layer", inner), ("", outer)):
            for which, shape in zip("AB", shapes, strict=True):
                tensors[f"base_model.model.{EXPERTS}{middle}.lora_{which}.weight"] = shape
        modules = read(tmp_path, tensors, {**LORA, "alpha_pattern": {".*.down_proj": 6}}).modules
        assert modules.keys() == {f"{EXPERTS}.gate_up", f"{EXPERTS}.down"}
        assert (modules[f"{EXPERTS}.gate_up"].scale, modules[f"{EXPERTS}.down"].scale) == (2.0, 3.0)
        assert ("base_layer" in modules[f"{EXPERTS}.gate_up"].down) == (inner is gate_up)
    each = {f"base_model.model.{EXPERTS}.2.up_proj.lora_{which}.weight": shape for which, shape in
            (("A", (2, 6)), ("B", (5, 2)))}  # fmt: skip
    assert list(read(tmp_path, each, LORA).modules) == [f"{EXPERTS}.2.up_proj"]


A, B = PLAIN
E_A, E_B, DOES = (f"base_model.model.{EXPERTS}.{end}" for end in ("lora_A.weight", "lora_B.weight", "2.up_proj."))
WRONG = {
    "no module": (
        {"base_model.model.model.layers.0.mlp.x.lora_A.weight": (2, 6)},
        {},
        r"layers.0.mlp.x.lora_A.* matches no",
    ),
    "shape of A": ({**PLAIN, A: (2, 7)}, {}, rf"{A} is \[2, 7\], but the model needs \[2, 6\]"),
    "shape of B": ({**PLAIN, B: (9, 2)}, {}, rf"{B} is \[9, 2\], but the model needs \[8, 2\]"),
    "rank": ({A: (9, 6), B: (8, 9)}, {"r": 9}, rf"{A} has rank 9, but max_lora_rank=8"),
    "rank in config": (PLAIN, {"r": 4}, rf"{A} has rank 2, but adapter_config.json says 4"),
    "no B": ({A: (2, 6)}, {}, "comes without its lora_B"),
    "unknown": ({**PLAIN, f"base_model.model.{Q}.lora_C": (2,)}, {}, r"lora_C has no meaning"),
    "type": (PLAIN, {"peft_type": "IA3"}, "peft_type='IA3'"),
    "feature": (PLAIN, {"layer_replication": [[0, 2]]}, "layer_replication"),
    "PiSSA": (PLAIN, {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4' .* changes the model's own weights"),
    "OLoRA": (PLAIN, {"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "shape of experts": ({E_A: (8, 7), E_B: (6, 8)}, {}, r"experts.lora_A.weight is \[8, 7\] .* of 4 experts"),
    "rank of experts": (
        {E_A: (4, 5), E_B: (6, 4)},
        {},
        "experts.lora_A.weight has rank 1, but adapter_config.json says 2",
    ),
    "no B of experts": ({E_A: (8, 5)}, {}, "experts.lora_A.weight comes without its lora_B"),
    "no such expert": ({A.replace("q_proj", "experts.9.up_proj"): (2, 6)}, {}, "experts.9.up_proj.* matches no"),
    "DoRA of an expert": (
        {f"{DOES}lora_A.weight": (2, 6), f"{DOES}lora_B.weight": (5, 2), f"{DOES}lora_magnitude_vector": (5,)},
        {},
        "lora_magnitude_vector is of an expert, where only lora_A and lora_B",
    ),
    "no magnitude": (PLAIN, {"use_dora": True}, "lora_magnitude_vector"),
    "prompt": ({"prompt_embeddings": (3, 7)}, PROMPT, r"prompt_embeddings is \[3, 7\], but the model needs \[3, 6\]"),
    "prefix": ({"prompt_embeddings": (3, 6)}, {**PROMPT, "peft_type": "PREFIX_TUNING"}, r"needs \[3, 16\]"),
    "saved": ({**PLAIN, "base_model.model.lm_head.weight": (51, 6)}, {}, r"lm_head.weight is \[51, 6\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str, tmp_path: Path) -> None:
    tensors, config, said = WRONG[what]
    with pytest.raises(AdapterError, match=f"adapter 'mine': .*{said}"):
        read(tmp_path, tensors, {**LORA, **config})


def test_a_task_must_be_chosen(tmp_path: Path) -> None:
    tensors = {"prompt_embeddings": (3, 6), "prefix_task_cols": (2, 3, 1), "prefix_task_rows": (2, 1, 6)}
    config = {**PROMPT, "peft_type": "MULTITASK_PROMPT_TUNING", "num_tasks": 2, "num_ranks": 1}
    assert read(tmp_path, tensors, config, task=1).task == 1
    for task in (None, 2, -1):
        with pytest.raises(AdapterError, match="has 2 tasks: give task_id from 0 to 1"):
            read(tmp_path, tensors, config, task)
    with pytest.raises(AdapterError, match="has no tasks"):
        read(tmp_path, PLAIN, LORA, task=0)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    catalog = AdapterCatalog(EngineConfig(ModelConfig("m")), TARGETS)
    with pytest.raises(AdapterNotFoundError, match="no such directory"):
        catalog.read("mine", str(tmp_path / "gone"))
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterNotFoundError, match="is a file; give the directory"):
        catalog.read("mine", str(tmp_path / "file"))
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_config.json"):
        catalog.read("mine", str(tmp_path))
    write(tmp_path, PLAIN, LORA)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(AdapterError, match="adapter_model.safetensors is damaged"):
        catalog.read("mine", str(tmp_path))
    file.unlink()
    with pytest.raises(AdapterNotFoundError, match="has no adapter_model.safetensors"):
        catalog.read("mine", str(tmp_path))
    with pytest.raises(RequestError, match="enable_lora=True"):
        AdapterCatalog(EngineConfig(ModelConfig("m")), None).find(LoRARequest("a", 1, str(tmp_path)))


def test_identity_is_content_and_not_the_name(tmp_path: Path) -> None:
    catalog = AdapterCatalog(EngineConfig(ModelConfig("m")), TARGETS)
    write(tmp_path / "a", PLAIN, LORA)
    write(tmp_path / "b", PLAIN, LORA)
    first = catalog.find(LoRARequest("x", 1, str(tmp_path / "a")))
    assert catalog.find(LoRARequest("y", 2, str(tmp_path / "b"))).digest == first.digest
    write(tmp_path / "a", PLAIN, LORA, fill=0.25)
    changed = catalog.find(LoRARequest("x", 1, str(tmp_path / "a")))
    write(tmp_path / "a", PLAIN, {**LORA, "lora_alpha": 5}, fill=0.25)
    assert len({first.digest, changed.digest, catalog.find(LoRARequest("x", 1, str(tmp_path / "a"))).digest}) == 3
    assert first.salted(b"mine") != changed.salted(b"mine") != b"mine" and catalog.used_ids == {1, 2}


@pytest.mark.parametrize("wrong", [("", 1, "p"), ("n", 0, "p"), ("n", True, "p"), ("n", 1, "")])
def test_a_lora_request_is_checked(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError):
        LoRARequest(*wrong)
