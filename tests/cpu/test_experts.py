"""Experts as the CPU library keeps and runs them, against the products of the very numbers that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvasir.kernels import reference
from kvasir.kernels.cpu import library
from kvasir.kernels.cpu.packed import BF16, INT4, INT8, Format, Layout, PackedStack, multiply_experts
from kvasir.layers.base import Build
from kvasir.layers.mesh import Mesh
from kvasir.layers.mlp import Experts, MoE
from kvasir.models import loader
from kvasir.models.loader import load_model
from kvasir.models.transformer import Transformer
from kvasir.quantization.cpu import CpuMethods
from tests.model_builders import make_config, make_hf_model, save
from tests.native_builders import SETS, require_library

FORMATS = {None: BF16, "int8": INT8, "int4": INT4}
# Results are rounded to bf16 after either product, and of int8 and int4 activations have 8 bits before either: that is
# 0.4 % and 1.3 % over many rows, nearly twice as much for single ones.
TOLERANCE = {None: 8e-3, "int8": 2.5e-2, "int4": 2.5e-2}
# How many tokens, and among how many of five experts they choose.
ROUTES = {"one token": (1, 5), "few": (6, 5), "many": (90, 4), "two experts": (33, 2), "none": (0, 5)}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(SETS[0])


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def route(tokens: int, experts: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the numbers of different experts for each token."""
    weights, chosen = torch.rand(tokens, experts).topk(top_k)
    return weights, chosen


def stack_of(weight: torch.Tensor, form: Format) -> PackedStack:
    layout = Layout(form, *weight.shape[1:])
    memory = torch.full(PackedStack.memory_shape(layout, len(weight)), 255, dtype=torch.uint8)
    stack = PackedStack(layout, memory)
    for number, matrix in enumerate(weight):
        stack.matrix(number).fill(matrix)
    return stack


def kept(stack: PackedStack) -> torch.Tensor:
    """The numbers that are multiplied, [experts, outputs, inputs]."""
    every = torch.arange(stack.layout.outputs)
    return torch.stack([stack.matrix(number).rows(every) for number in range(len(stack.memory))]).double()


def product(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str | tuple[float, float] = "silu",
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """In float64, token by token and expert by expert."""
    first, second = (bias.double() for bias in biases) if biases else (torch.zeros(len(down), 1),) * 2
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            inner = reference.gated_activation(gate_up[expert] @ row + first[expert], activation)
            out[token] += weight.double() * (down[expert] @ inner + second[expert])
    return out


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("inner", [48, 24, 20])  # the last two are no whole blocks
@pytest.mark.parametrize("routes", ROUTES)
def test_products(routes: str, inner: int, quantization: str | None, instruction_set: str) -> None:
    form, hidden = FORMATS[quantization], 72
    gate_up = stack_of(torch.randn(5, 2 * inner, hidden) / hidden**0.5, form)
    down = stack_of(torch.randn(5, hidden, inner) / inner**0.5, form)
    (weights, chosen), x = route(*ROUTES[routes]), torch.randn(ROUTES[routes][0], hidden).bfloat16()
    wanted = product(kept(gate_up), kept(down), x, weights, chosen)
    assert error(multiply_experts(gate_up, down, x, weights, chosen, "silu"), wanted) < TOLERANCE[quantization]


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("routes", ["one token", "many"])
def test_biases_and_a_clamped_gate(routes: str, quantization: str | None, instruction_set: str) -> None:
    """Those of gpt-oss; both limits are met."""
    form, hidden, inner, activation = FORMATS[quantization], 72, 40, (1.702, 1.5)
    biases = torch.randn(5, 2 * inner).bfloat16(), torch.randn(5, hidden).bfloat16()
    plain = stack_of(torch.randn(5, 2 * inner, hidden) * 0.2, form), stack_of(torch.randn(5, hidden, inner) * 0.2, form)
    gate_up, down = (PackedStack(s.layout, s.memory, bias) for s, bias in zip(plain, biases, strict=True))
    (weights, chosen), x = route(*ROUTES[routes]), torch.randn(ROUTES[routes][0], hidden).bfloat16()
    wanted = product(kept(gate_up), kept(down), x, weights, chosen, activation, biases)
    assert error(multiply_experts(gate_up, down, x, weights, chosen, activation), wanted) < TOLERANCE[quantization]
    x[0, 3] = torch.nan
    assert multiply_experts(gate_up, down, x, weights, chosen, activation)[0].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = stack_of(torch.randn(5, 96, 64), BF16), stack_of(torch.randn(5, 64, 48), BF16)
    (weights, chosen), x = route(3, 5), torch.randn(3, 64).bfloat16()
    wrong: list[tuple[type[Exception], tuple[Any, ...]]] = [
        (IndexError, (gate_up, down, x, weights, chosen + 5)),
        (IndexError, (gate_up, down, x, weights, chosen - 5)),
        (ValueError, (gate_up, down, x[:2], weights, chosen)),
        (ValueError, (gate_up, down, x, weights[:, :1], chosen)),
        (ValueError, (gate_up, down, x[:, :48], weights, chosen)),
        (ValueError, (gate_up, stack_of(torch.randn(5, 64, 32), BF16), x, weights, chosen)),
        (ValueError, (gate_up, stack_of(torch.randn(4, 64, 48), BF16), x, weights, chosen)),
        (TypeError, (gate_up, down, x.float(), weights, chosen)),
        (TypeError, (gate_up, down, x, weights.double(), chosen)),
        (TypeError, (gate_up, down, x, weights, chosen.int())),
    ]
    for error_type, arguments in wrong:
        with pytest.raises(error_type):
            multiply_experts(*arguments, "silu")
    with pytest.raises(ValueError, match="memory of"):
        PackedStack(down.layout, gate_up.memory)


def test_a_token_gets_the_same_in_any_batch() -> None:
    gate_up, down = stack_of(torch.randn(5, 96, 64), BF16), stack_of(torch.randn(5, 64, 48), BF16)
    (weights, chosen), x = route(40, 5), torch.randn(40, 64).bfloat16()
    together = multiply_experts(gate_up, down, x, weights, chosen, "silu")
    for token in range(40):
        one = slice(token, token + 1)
        alone = multiply_experts(gate_up, down, x[one], weights[one], chosen[one], "silu")
        assert error(together[one], alone) < 5e-3


# ---------------------------------------------------------------- within a model


def experts_of(model: Transformer) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def weight_of(experts: Experts, name: str) -> torch.Tensor:
    stacks: dict[str, PackedStack] = experts.__dict__["stacks"]
    return kept(stacks[name])


@pytest.fixture(params=["mixtral", "qwen2_moe", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    require_library()
    return save(make_hf_model(request.param), tmp_path / "model")


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_checkpoints_experts_are_packed(checkpoint: Path, quantization: str | None) -> None:
    """They hold what the checkpoint has as near as the format can, and what they compute is its product."""
    plain = experts_of(load_model(make_config(checkpoint), torch.device("cpu")))
    config = make_config(checkpoint, "cpu", dtype="bfloat16", quantization=quantization)
    packed = experts_of(load_model(config, torch.device("cpu")))
    assert len(packed) == len(plain) > 0
    far = {None: 3e-3, "int8": 8e-3, "int4": 0.11}[quantization]
    for ours, theirs in zip(packed, plain, strict=True):
        for name, weight in (("gate_up", theirs.gate_up), ("down", theirs.down)):
            assert ours.__dict__["stacks"][name].layout.format == FORMATS[quantization]
            assert error(weight_of(ours, name), weight.data) < far
        (weights, chosen), x = route(9, ours.shape.num_experts), torch.randn(9, ours.shape.hidden_size).bfloat16()
        wanted = product(weight_of(ours, "gate_up"), weight_of(ours, "down"), x, weights, chosen)
        assert error(ours(x, weights, chosen), wanted) < TOLERANCE[quantization]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_decides_the_route_is_not_quantized(checkpoint: Path, quantization: str) -> None:
    plain, small = (
        load_model(make_config(checkpoint, "cpu", dtype="bfloat16", quantization=how), torch.device("cpu"))
        for how in (None, quantization)
    )
    x = torch.randn(7, plain.spec.hidden_size).bfloat16()
    routed = 0
    for ours, theirs in zip(small.modules(), plain.modules(), strict=True):
        if isinstance(ours, MoE) and isinstance(theirs, MoE):
            routed += 1
            assert torch.equal(ours.router(x), theirs.router(x))
            if ours.shared is not None:
                assert torch.equal(ours.shared_gate(x), theirs.shared_gate(x))
    assert routed == len(experts_of(plain))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.54), ("int4", 0.32)])
def test_memory_is_smaller(quantization: str, most: float) -> None:
    """8 bits and a scale for 32 of them, or 4 bits, a scale and a min."""

    def num_bytes(methods: CpuMethods) -> int:
        experts = Experts(Build(torch.bfloat16, methods=methods), "experts", 8, 256, 128)
        return sum(value.nbytes for value in experts.parameters())

    whole = num_bytes(CpuMethods(None))
    assert whole == 8 * 3 * 128 * 256 * 2
    assert num_bytes(CpuMethods(quantization)) <= most * whole


@pytest.mark.parametrize("quantization", FORMATS)
def test_ranks_share_the_inner_dimension(checkpoint: Path, quantization: str | None) -> None:
    config = make_config(checkpoint, "cpu", dtype="bfloat16", quantization=quantization)
    whole = experts_of(load_model(make_config(checkpoint), torch.device("cpu")))[0]
    ranks = [experts_of(load_model(config, torch.device("cpu"), Mesh(rank, 2)))[0] for rank in range(2)]
    halves = [weight_of(rank, "gate_up").chunk(2, dim=1) for rank in ranks]
    gate_up = torch.cat([part for pair in zip(*halves, strict=True) for part in pair], dim=1)
    down = torch.cat([weight_of(rank, "down") for rank in ranks], dim=2)
    far = {None: 3e-3, "int8": 8e-3, "int4": 0.11}[quantization]
    assert error(gate_up, whole.gate_up.data) < far and error(down, whole.down.data) < far
    (weights, chosen), x = route(9, whole.shape.num_experts), torch.randn(9, whole.shape.hidden_size).bfloat16()
    parts = [rank.method.apply(rank, x, weights, chosen, "silu").double() for rank in ranks]
    assert error(parts[0] + parts[1], product(gate_up, down, x, weights, chosen)) < TOLERANCE[quantization]


@pytest.mark.parametrize("quantization", FORMATS)
def test_they_are_kept_on_disk(
    checkpoint: Path, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"quantization": quantization, "packed_weights_dir": str(tmp_path / "packed")}
    config = make_config(checkpoint, "cpu", dtype="bfloat16", **settings)
    first = load_model(config, torch.device("cpu"))
    (file,) = (tmp_path / "packed").iterdir()
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if ".experts." in name]  # noqa: SIM118  # it is no mapping
        assert len(names) == 2 * len(experts_of(first))
        assert {opened.get_tensor(name).dtype for name in names} == {torch.uint8}
    monkeypatch.delattr(loader, "_fill")  # nothing is read from the checkpoint
    again = load_model(config, torch.device("cpu"))
    for ours, theirs in zip(experts_of(again), experts_of(first), strict=True):
        for name in ("gate_up", "down"):
            assert torch.equal(weight_of(ours, name), weight_of(theirs, name))


@pytest.mark.parametrize("quantization", FORMATS)
def test_dummy_weights_reach_every_expert(checkpoint: Path, quantization: str | None) -> None:
    settings = {"quantization": quantization, "load_format": "dummy"}
    model = load_model(make_config(checkpoint, "cpu", dtype="bfloat16", **settings), torch.device("cpu"))
    for experts in experts_of(model):
        for name in ("gate_up", "down"):
            spread = weight_of(experts, name).flatten(1).std(dim=1)
            assert ((spread > 0.015) & (spread < 0.025)).all()


def test_dummy_routers_prefer_no_expert(checkpoint: Path) -> None:
    model = load_model(make_config(checkpoint, load_format="dummy"), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, MoE):
            weight = module.router.weight.data
            weight = weight.to_dense() if weight.is_mkldnn else weight
            lengths = weight.norm(dim=1)
            torch.testing.assert_close(lengths, torch.full_like(lengths, 0.02 * weight.shape[1] ** 0.5))
