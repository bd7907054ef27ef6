"""Two ranks with half of the model each, over Gloo, say what one rank says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from kvasir.errors import ConfigError
from kvasir.layers.base import Build
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mesh import Mesh
from kvasir.layers.mlp import Experts
from kvasir.models.loader import load_model
from tests.cpu.test_experts import error
from tests.model_builders import PagedModel, make_config, make_hf_model, save
from tests.native_builders import SETS, require_library

NAMES = (
    *("llama_tied_biases_llama3", "llama_linear_gelu_one_head", "qwen3"),  # biases; one key head for two ranks; norms
    *("deepseek_v3", "deepseek_v2_lite", "gpt_oss"),  # a latent cache; sinks and biases of experts
)
# Also with whole experts on each rank: groups of experts, biases, a gated shared one, inputs that are weighed, norms
# over all heads.
SPREAD = (
    *("deepseek_v3", "gpt_oss", "qwen2_moe", "granitemoeshared", "llama4"),
    *("dbrx", "minimax_m2", "glm4_moe", "olmoe"),
)
EVEN = {"granitemoeshared": {"num_local_experts": 6}}  # as many for either rank
EXPERTS, LIBRARY = "mixtral", {"backend": "cpu", "dtype": "bfloat16"}  # computed by the CPU library
STEPS = [{"a": list(range(9)), "b": [5]}, {"a": [3], "b": [1, 2, 3]}]


def logits(path: Path, mesh: Mesh | None = None) -> torch.Tensor:
    """With a cache of the model's type, then of 8 bits."""
    model = load_model(make_config(path), torch.device("cpu"), mesh)
    return torch.cat([run(PagedModel(model, kv_dtype=dtype)) for dtype in (None, torch.float8_e4m3fn)])


def logits_of_experts(path: Path, mesh: Mesh | None = None, **settings: Any) -> torch.Tensor:
    return run(PagedModel(load_model(make_config(path, **settings), torch.device("cpu"), mesh)))


def run(paged: PagedModel) -> torch.Tensor:
    return torch.cat([rows for step in STEPS for rows in paged.step(step).values()])


def run_rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{directory}/meeting", rank=rank, world_size=2)
    for name in NAMES:
        torch.save(logits(directory / name, Mesh(rank, 2)), directory / f"{name}.{rank}")
    for name in SPREAD:
        torch.save(logits(directory / name, Mesh(rank, 2, whole_experts=True)), directory / f"{name}.apart.{rank}")
    if SETS:
        torch.save(logits_of_experts(directory / EXPERTS, Mesh(rank, 2), **LIBRARY), directory / f"{EXPERTS}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes have computed all models, and left their logits here."""
    path = tmp_path_factory.mktemp("ranks")
    for name in {*NAMES, *SPREAD, EXPERTS}:
        save(make_hf_model(name, **EVEN.get(name, {})), path / name)
    multiprocessing.spawn(run_rank, (path,), nprocs=2)  # type: ignore[no-untyped-call]
    return path


def test_two_ranks_equal_one(ranks: Path) -> None:
    for name in NAMES:
        expected = logits(ranks / name)
        for rank in range(2):
            torch.testing.assert_close(torch.load(ranks / f"{name}.{rank}"), expected, atol=1e-5, rtol=1e-5)


def test_whole_experts_on_two_ranks_equal_one(ranks: Path) -> None:
    for name in SPREAD:
        expected = logits(ranks / name)
        for rank in range(2):
            torch.testing.assert_close(torch.load(ranks / f"{name}.apart.{rank}"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, LIBRARY], ids=["torch", "library"])
def test_each_rank_keeps_half_of_the_experts(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings:
        require_library()
    path = save(make_hf_model("qwen3_moe"), tmp_path)
    config = make_config(path, **settings)
    meshes = (None, Mesh(0, 2, whole_experts=True), Mesh(1, 2, whole_experts=True))
    whole, *halves = (
        next(m for m in load_model(config, torch.device("cpu"), mesh).modules() if isinstance(m, Experts))
        for mesh in meshes
    )
    assert [half.gate_up.numel() * 2 for half in halves] == [whole.gate_up.numel()] * 2
    x = torch.randn(7, whole.shape.hidden_size).to(getattr(torch, config.model.dtype))
    weights, chosen = torch.rand(7, 6).topk(3)
    for half in halves:
        half.mesh = Mesh()  # what the rank computes, before the sum
    found = sum(half(x, weights, chosen).double() for half in halves)
    assert error(found, whole(x, weights, chosen)) < (1e-2 if settings else 1e-5)


def test_experts_of_two_ranks_are_as_near_as_of_one(ranks: Path) -> None:
    require_library()
    path = ranks / EXPERTS
    exact, alone = logits_of_experts(path), logits_of_experts(path, **LIBRARY)
    for rank in range(2):
        assert error(torch.load(f"{path}.{rank}"), exact) < 1.5 * error(alone, exact) + 2e-3


def test_each_rank_keeps_half(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen3"), tmp_path)
    config = make_config(path, load_format="dummy")
    whole, half = (load_model(config, torch.device("cpu"), mesh) for mesh in (None, Mesh(1, 2)))
    assert half.page_shape(4) == (2, 4, 1, 24)
    assert whole.kv_spec(4, torch.float32).page_bytes == 2 * half.kv_spec(4, torch.float32).page_bytes
    assert half.embedding.weight.shape[0] == 48


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = save(make_hf_model("qwen3"), tmp_path)
    with pytest.raises(ConfigError, match=r"vocab_size \(96\) cannot be split over 5 ranks"):
        load_model(make_config(path), torch.device("cpu"), Mesh(0, 5))
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) cannot be split over 3 ranks"):
        load_model(make_config(path), torch.device("cpu"), Mesh(0, 3))
    with pytest.raises(ConfigError, match=r"num_key_value_heads \(2\) cannot be split over 3 ranks"):
        Mesh(0, 3).shard_heads(2, "num_key_value_heads")


def test_shards_cover_the_whole() -> None:
    assert [Mesh(rank, 4).shard(12, "x") for rank in range(4)] == [slice(i, i + 3) for i in (0, 3, 6, 9)]
    assert [Mesh(rank, 4).shard_heads(2, "x").start for rank in range(4)] == [0, 0, 1, 1]
    assert Mesh().shard(7, "x") == slice(0, 7)


def test_replicated_layers_are_whole_on_every_rank() -> None:
    layer = replicated_linear(Build(torch.float32, Mesh(1, 2), device=torch.device("cpu")), "gate", 6, 4, bias=True)
    weight, bias = torch.randn(4, 6), torch.randn(4)
    layer.load(("weight", None), weight)
    layer.load(("bias", None), bias)
    layer.process()
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
