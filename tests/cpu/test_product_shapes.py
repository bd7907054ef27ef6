"""What benchmarks/h200/tune_products.py measures of a model is what the model multiplies."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvasir.models.loader import load_model
from tests.conftest import ROOT
from tests.model_builders import make_config, make_hf_model, save
from tests.teacher_forced import WIDTHS

FITTING = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "h200"))
    return import_module("product_shapes")


@pytest.mark.parametrize("name", WIDTHS)
def test_known_models_are_what_their_config_says(shapes: ModuleType, name: str) -> None:
    kind, shape = WIDTHS[name]
    config = {**shape, "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]]}
    assert shapes.products_of_config(config) == shapes.products_of(name)


def products_in(model: Any) -> set[tuple[str, tuple[int, ...], bool]]:
    """Of the layers themselves: kind, shape, and whether parts may be left."""
    found = set()
    for layer in model.layers:
        kinds = ["norm", "add", "gated", "add"] if layer.fuses else ["plain"] * 4
        mlp = layer.mlp
        linears = [layer.attention.qkv, layer.attention.o, getattr(mlp, "gate_up", getattr(mlp, "up", None)), mlp.down]
        for kind, linear in zip(kinds, linears, strict=True):
            found.add((kind, tuple(linear.weight.shape), linear.leaves_parts))
    head = model.embedding if model.spec.tie_embeddings else model.head
    return {*found, ("plain", tuple(head.weight.shape), False)}


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2", "granite", "cohere", "starcoder2", "stablelm_parallel"],
)
def test_products_are_those_of_the_layers(shapes: ModuleType, name: str, tmp_path: Path) -> None:
    changes = FITTING if name != "gpt_neox" else {key: FITTING[key] for key in FITTING if key != "head_dim"}
    path = save(make_hf_model(name, **changes), tmp_path)
    model = load_model(make_config(path), torch.device("cpu"))
    ours = shapes.products_of(str(path))
    assert {(p.kind, (p.rows, p.inner), p.leaves_parts) for p in ours} == products_in(model)
    assert len(ours) == len(set(ours))


def test_what_no_kernel_takes_is_not_fused(shapes: ModuleType, tmp_path: Path) -> None:
    path = save(make_hf_model("llama", hidden_size=96, head_dim=32), tmp_path)
    assert {product.kind for product in shapes.products_of(str(path))} == {"plain"}


def test_shapes_may_be_written_out(shapes: ModuleType) -> None:
    assert shapes.parse("norm:6144x2560") == shapes.Product("norm", 6144, 2560)
    assert shapes.parse(" add:2560x4096") == shapes.Product("add", 2560, 4096, leaves_parts=True)
    for wrong in ("fused:1x2", "norm:12", "norm:4096x1024x3"):
        with pytest.raises(SystemExit, match="kind:OUTPUTSxINPUTS"):
            shapes.parse(wrong)


def test_a_model_that_is_not_there_is_named(shapes: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no model of qwen3-0.6b, llama-3.1-8b, no directory and no name on the hub"):
        shapes.products_of("qwen-nowhere")
    with pytest.raises(SystemExit, match="has no config.json"):
        shapes.products_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(Exception, match="NoSuchModel"):
        shapes.products_of(str(tmp_path))


def test_what_is_asked_for_is_measured_once(shapes: ModuleType) -> None:
    pytest.importorskip("triton")
    script = import_module("tune_products")
    both = script.wanted(Namespace(models=None, shapes=None))
    assert both == [*shapes.KNOWN["qwen3-0.6b"], *shapes.KNOWN["llama-3.1-8b"]]
    written = script.wanted(Namespace(models="qwen3-0.6b", shapes="plain:151936x1024,norm:64x512"))
    assert written == [*shapes.KNOWN["qwen3-0.6b"], shapes.Product("norm", 64, 512)]
    assert script.wanted(Namespace(models=None, shapes="norm:64x512")) == [shapes.Product("norm", 64, 512)]
