"""Loading: every layout of a checkpoint gives the same model, and every fault one sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir import platforms
from kvasir.errors import ConfigError, ModelError
from kvasir.models import architectures, loader
from kvasir.models.checkpoint import is_finite
from kvasir.models.loader import load_model
from kvasir.models.transformer import Transformer
from tests.model_builders import PagedModel, make_config, make_hf_model, save

CPU = torch.device("cpu")
TEXT = list(range(20))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(make_hf_model("llama"), tmp_path / "model")


def logits(model: Transformer) -> torch.Tensor:
    return PagedModel(model).step({"a": TEXT})["a"]


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a checkpoint; `__` stands for a dot."""
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")


def refusal(checkpoint: Path, /, **changes: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(make_config(checkpoint, **changes), CPU)
    return str(caught.value)


# ---------------------------------------------------------------- layouts


def test_shards_equal_one_file(checkpoint: Path, tmp_path: Path) -> None:
    sharded = save(make_hf_model("llama"), tmp_path / "sharded", max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load_model(make_config(sharded), CPU)), logits(load_model(make_config(checkpoint), CPU)))


def test_shards_without_index(tmp_path: Path) -> None:
    sharded = save(make_hf_model("llama"), tmp_path, max_shard_size="10KB")
    before = logits(load_model(make_config(sharded), CPU))
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "consolidated.safetensors").write_bytes(b"Mistral's second copy is not looked at")
    assert torch.equal(logits(load_model(make_config(sharded), CPU)), before)


def test_a_decoder_saved_without_its_head(tmp_path: Path) -> None:
    """Its tensors' names lack the first part."""
    for name in ("llama_tied_biases_llama3", "gpt2"):
        hf = make_hf_model(name)
        whole = logits(load_model(make_config(save(hf, tmp_path / name)), CPU))
        hf.base_model.save_pretrained(tmp_path / f"{name}_bare")
        (tmp_path / name / "model.safetensors").write_bytes(
            (tmp_path / f"{name}_bare" / "model.safetensors").read_bytes()
        )
        assert torch.equal(logits(load_model(make_config(tmp_path / name), CPU)), whole)


def test_a_head_that_differs_is_used_whatever_config_says(tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint = save(make_hf_model("llama"), tmp_path)
    untied = logits(load_model(make_config(checkpoint), CPU))
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    assert torch.equal(logits(load_model(make_config(checkpoint), CPU)), untied)
    assert any("lm_head.weight differs from model.embed_tokens.weight" in line for line in log_lines)


def test_a_tied_matrix_may_be_under_either_name_or_both(tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint = save(make_hf_model("llama_tied_biases_llama3"), tmp_path)
    found = [logits(load_model(make_config(checkpoint), CPU))]
    matrix = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"].clone()
    for there in ({"model__embed_tokens__weight": matrix}, {"model__embed_tokens__weight": None}):
        edit(checkpoint, lm_head__weight=matrix.clone(), **there)
        found.append(logits(load_model(make_config(checkpoint), CPU)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not any("differs from" in line for line in log_lines)


def test_weights_are_cast(checkpoint: Path) -> None:
    model = load_model(make_config(checkpoint, dtype="bfloat16"), CPU)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16


def test_no_parameter_wants_a_gradient(checkpoint: Path) -> None:
    model = load_model(make_config(checkpoint), CPU)
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())


def test_old_leftovers_are_ignored(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen2"), tmp_path)  # tied
    before = logits(load_model(make_config(path), CPU))
    edit(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert torch.equal(logits(load_model(make_config(path), CPU)), before)


def test_progress_bar_is_shown_if_wanted(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(make_config(checkpoint), CPU)
    assert "Loading weights" not in capfd.readouterr().err
    load_model(make_config(checkpoint, use_tqdm_on_load=True), CPU)
    assert "Loading weights: 100%" in capfd.readouterr().err


# ---------------------------------------------------------------- dummy weights


def test_dummy_weights_need_no_file_and_follow_the_seed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    models = [load_model(make_config(checkpoint, load_format="dummy", seed=seed), CPU) for seed in (1, 1, 2)]
    first, again, other = (logits(model) for model in models)
    assert first.isfinite().all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.015 < models[0].embedding.weight.std() < 0.025
    assert (models[0].norm.weight == 1).all()


def test_dummy_biases_are_zero(tmp_path: Path) -> None:
    model = load_model(make_config(save(make_hf_model("qwen2"), tmp_path), load_format="dummy"), CPU)
    assert not model.layers[0].attention.qkv.bias.any()


# ---------------------------------------------------------------- faults


def test_no_directory(checkpoint: Path) -> None:
    assert refusal(checkpoint, path="/nowhere") == "The model directory /nowhere does not exist."


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "has no weights: there is no .safetensors file" in refusal(checkpoint)
    (checkpoint / "pytorch_model.bin").touch()
    assert "has weights as .bin files only" in refusal(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or is no safetensors file" in refusal(checkpoint)


def test_other_file_under_the_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is truncated or is no safetensors file" in refusal(checkpoint)


def test_missing_shard(tmp_path: Path) -> None:
    path = save(make_hf_model("llama"), tmp_path, max_shard_size="10KB")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    message = refusal(path)
    assert "lacks 1 of the" in message
    assert gone.name in message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_corrupt_index(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not a readable index" in refusal(checkpoint)


def test_missing_tensors(checkpoint: Path) -> None:
    edit(checkpoint, model__norm__weight=None, model__layers__1__self_attn__k_proj__weight=None)
    message = refusal(checkpoint)
    assert "2 of 30 tensors are missing" in message
    assert "model.norm.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight" in message


def test_unexpected_tensors(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    assert "1 tensors have no place in the model (model.layers.0.self_attn.q_proj.bias)" in refusal(checkpoint)


def test_more_layers_than_the_config_says(checkpoint: Path) -> None:
    hf = json.loads((checkpoint / "config.json").read_text())
    message = refusal(checkpoint, hf={**hf, "num_hidden_layers": 2})
    assert "9 tensors have no place in the model (model.layers.2." in message
    assert "and 6 more" in message


def test_shape_mismatch(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__0__mlp__up_proj__weight=torch.ones(47, 32))
    message = refusal(checkpoint)
    assert "model.layers.0.mlp.up_proj.weight in model.safetensors is [47, 32], but should be [48, 32]" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_weights_that_are_not_finite(checkpoint: Path, backend: str, value: float) -> None:
    tensor = load_file(checkpoint / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    tensor[-1, 3] = value
    edit(checkpoint, model__layers__1__mlp__up_proj__weight=tensor)
    message = refusal(checkpoint, backend=backend, dtype="bfloat16" if backend == "cpu" else "float32")
    assert "model.layers.1.mlp.up_proj.weight in model.safetensors has values that are not finite" in message


def test_weights_too_large_for_dtype(checkpoint: Path) -> None:
    edit(checkpoint, model__norm__weight=torch.full((32,), 1e5))
    load_model(make_config(checkpoint, dtype="bfloat16"), CPU)
    assert "model.norm.weight" in refusal(checkpoint, dtype="float16")


def test_weights_on_a_device_are_checked_there(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices than a CPU do, on one."""
    monkeypatch.setattr(loader, "_process", lambda model: None)  # weights that a CPU has packed cannot be checked
    model = load_model(make_config(checkpoint), CPU)
    source = loader._open_safetensors(checkpoint, architectures.find(make_config(checkpoint).model.hf), {})
    places = loader.find_places(model, source.names, model.spec)
    loader._check_on_device(model, source.checkpoint, places)
    tensor = load_file(checkpoint / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    tensor[0, 0] = float("nan")
    edit(checkpoint, model__layers__0__self_attn__k_proj__weight=tensor)
    source = loader._open_safetensors(checkpoint, architectures.find(make_config(checkpoint).model.hf), {})
    loader._fill(source.checkpoint, places, dtype=None, show_progress=False)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight"):
        loader._check_on_device(model, source.checkpoint, places)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_value_is_found_anywhere(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size).to(dtype)
    assert is_finite(tensor)
    for place in {0, size // 3, size - 1}:
        for value in (float("nan"), float("inf"), float("-inf")):
            broken = tensor.clone()
            broken[place] = value
            assert not is_finite(broken), (place, value)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen2"), tmp_path)
    hf = json.loads((path / "config.json").read_text())
    assert "lm_head.weight" in refusal(path, hf={**hf, "tie_word_embeddings": False})


def test_unknown_architecture(checkpoint: Path) -> None:
    message = refusal(checkpoint, hf={"architectures": ["NoSuchModel"]})
    assert "NoSuchModel is not supported; supported are LlamaForCausalLM" in message


def test_quantized_checkpoint(checkpoint: Path) -> None:
    hf = json.loads((checkpoint / "config.json").read_text())
    assert "no bits" in refusal(checkpoint, hf={**hf, "quantization_config": {"quant_method": "gptq"}})
    assert "quant_method 'quip'" in refusal(checkpoint, hf={**hf, "quantization_config": {"quant_method": "quip"}})


def test_weights_larger_than_memory(checkpoint: Path) -> None:
    hf = json.loads((checkpoint / "config.json").read_text())
    sizes = {"vocab_size": 1 << 24, "hidden_size": 1 << 20}
    config = make_config(checkpoint, hf={**hf, **sizes}, load_format="dummy")
    with pytest.raises(ConfigError, match=r"weights need \d+\.\d\d GiB, but \d+\.\d\d GiB is free on cpu"):
        load_model(config, CPU)


def test_allocation_that_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_memory_for", fail)
    with pytest.raises(ConfigError, match=r"The model's weights need .* GiB is free on cpu"):
        load_model(make_config(checkpoint), CPU)


def test_memory_nobody_knows_is_tried(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = logits(load_model(make_config(checkpoint), CPU))
    monkeypatch.setattr(platforms.select("cpu").__class__, "memory_free", lambda self: None)
    assert torch.equal(logits(load_model(make_config(checkpoint), CPU)), known)


def test_weights_are_not_held_twice(tmp_path: Path) -> None:
    """Filling a model of 100 MB takes about that much more memory, not twice as much."""
    path = save(make_hf_model("llama", vocab_size=96, hidden_size=1024, intermediate_size=4096), tmp_path)
    config = make_config(path)
    platform = platforms.select("cpu")
    load_model(config, CPU)  # what the libraries take on first use
    weights = (path / "model.safetensors").stat().st_size
    before = platform.memory_used()
    model = load_model(config, CPU)
    after = platform.memory_used()
    assert after - before < 1.5 * weights
    assert model.vocab_size == 96
