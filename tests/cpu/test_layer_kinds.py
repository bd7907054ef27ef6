"""A kind of layer that the decoder does not know: a dataclass and a module registered for it, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.attention.torch import TorchAttention
from kvasir.errors import ModelError
from kvasir.layers.attention import ATTENTIONS, AttentionLayer
from kvasir.layers.base import Build, DecoderBuild
from kvasir.layers.linear import replicated_linear
from kvasir.layers.mlp import FEED_FORWARDS, FeedForward
from kvasir.layers.norm import Norm
from kvasir.layers.spec import AttentionSpec, GatedMLPSpec, RMSNormSpec
from kvasir.models.loader import _fill_dummy, _process
from kvasir.models.spec import DecoderSpec, LayerSpec, pre_norm
from kvasir.models.transformer import Transformer
from kvasir.worker.memory import KVMemory
from tests.model_builders import PagedModel

WIDTH, CPU, NORM = 6, torch.device("cpu"), RMSNormSpec(1e-6)


@dataclass(frozen=True)
class MeanSpec:
    """Attention that gives all tokens the same weight; its cache holds one vector per token."""

    width: int
    window: int | None = None


@ATTENTIONS.register(MeanSpec)
class MeanAttention(AttentionLayer):
    def __init__(self, build: DecoderBuild, spec: MeanSpec, prefix: str) -> None:
        super().__init__()
        self.width = spec.width
        self.down = replicated_linear(build, f"{prefix}.down", build.hidden_size, spec.width, bias=False)
        self.up = replicated_linear(build, f"{prefix}.up", spec.width, build.hidden_size, bias=False)

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        return block_size, self.width

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, last: LastTokens | None = None
    ) -> torch.Tensor:
        size = batch.block_size
        self.kv_cache[batch.slots // size, batch.slots % size] = self.down(x)
        found = []
        for row, (begin, end) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
            kept = self.kv_cache[batch.tables[batch.rows[row]].long()].flatten(0, 1)
            found += [kept[: int(positions[token]) + 1].mean(0) for token in range(int(begin), int(end))]
        y: torch.Tensor = self.up(torch.stack(found))
        return y if last is None else last.of(y)


@dataclass(frozen=True)
class SquareSpec:
    """A feed-forward network without weights."""

    factor: float


@FEED_FORWARDS.register(SquareSpec)
class Square(FeedForward):
    def __init__(self, build: DecoderBuild, spec: SquareSpec, prefix: str) -> None:
        super().__init__()
        self.factor = spec.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x * x


def make_model(*layers: LayerSpec) -> Transformer:
    spec = DecoderSpec(50, 16, layers, NORM, tie_embeddings=True)
    model = Transformer(Build(torch.float32, device=CPU), spec, TorchAttention(), 64)
    _fill_dummy(model, torch.Generator().manual_seed(0))
    _process(model)
    return model.eval()


def test_a_new_kind_runs_and_states_its_page() -> None:
    model = make_model(*[pre_norm(NORM, MeanSpec(WIDTH), SquareSpec(0.5))] * 2)  # type: ignore[arg-type]
    spec = model.kv_spec(4, torch.float32)
    assert (spec.num_layers, spec.page_bytes, model.page_shape(4)) == (2, 4 * WIDTH * 4, (4, WIDTH))
    assert [tuple(view.shape) for view in KVMemory(spec, 9, CPU).views(model.page_shape(4), torch.float32)] == [
        (9, 4, WIDTH)
    ] * 2
    paged, text = PagedModel(model), list(range(3, 20))
    found = torch.cat([paged.step({"a": text[:9]})["a"], *(paged.step({"a": [token]})["a"] for token in text[9:])])
    assert torch.allclose(found, by_hand(model, text), atol=1e-5)


def by_hand(model: Transformer, text: list[int]) -> torch.Tensor:
    stream = model.embedding.weight[torch.tensor(text)]
    for layer in model.layers:
        attention, normed = layer.attention, layer.attention_norm(stream)
        counts = torch.arange(1, len(text) + 1)[:, None]
        stream = stream + attention.up(attention.down(normed).cumsum(0) / counts)
        stream = stream + 0.5 * layer.mlp_norm(stream) ** 2
    return model.logits(model.norm(stream))


def test_nothing_of_a_new_kind_is_fused_unless_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(
        pre_norm(NORM, AttentionSpec(2, 2, 8), SquareSpec(0.5)),  # type: ignore[arg-type]
        pre_norm(NORM, AttentionSpec(2, 2, 8), GatedMLPSpec(32)),
    )
    assert [layer.fuses for layer in model.layers] == [False, True]
    assert len(model.compile_copy().layers) == 3, "one of each kind, and the last one"


def test_pages_of_several_shapes_are_refused() -> None:
    model = make_model(
        pre_norm(NORM, AttentionSpec(2, 2, 8), GatedMLPSpec(32)),
        pre_norm(NORM, MeanSpec(WIDTH), GatedMLPSpec(32)),  # type: ignore[arg-type]
    )
    with pytest.raises(ModelError, match="pages of 2 shapes; one shape is supported"):
        model.kv_spec(4, torch.float32)


def test_a_kind_that_nobody_registered_is_named() -> None:
    with pytest.raises(ModelError, match="No feed-forward network is registered for RMSNormSpec"):
        make_model(pre_norm(NORM, AttentionSpec(2, 2, 8), NORM))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "lacking"), [(AttentionLayer, "page_shape"), (FeedForward, "forward"), (Norm, "forward")]
)
def test_a_kind_without_its_method_cannot_be_built(kind: type, lacking: str) -> None:
    with pytest.raises(TypeError, match=f"abstract method.*{lacking}"):
        type("Unfinished", (kind,), {})()
