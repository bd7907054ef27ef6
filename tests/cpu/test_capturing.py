"""The watch over captured steps finds what CUDA graphs cannot capture. `compile_for_gpu.py` uses it on whole steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvasir.quantization.coded import Coding, RandomCoding
from tests.capturing import capturing

X = torch.arange(6.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda: X.sum().item(),
        lambda: X.tolist(),
        lambda: bool(X.sum() > 3),
        lambda: X[X > 2],
        lambda: X.nonzero(),
        lambda: X.clone().masked_fill_(X > 2, 0)[X > 1].add_(1),
        lambda: X.unique(),
        lambda: torch.equal(X, X),
        lambda: torch.tensor([1.0]) * X,
        lambda: X.cpu().numpy(),
        lambda: X.clone().__setitem__(torch.arange(2), 1),
        lambda: X.clone().__setitem__((torch.arange(2),), 1.0),
    ],
)
def test_waits_and_copies(run: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="which a CUDA graph cannot capture"), capturing():
        run()


def test_what_stays_on_the_device() -> None:
    with capturing():
        y = torch.where(X > 2, X, 0.0)[torch.arange(3)]
        y[torch.arange(2)] = torch.ones(2)
        y[:2] = 1
        y.index_fill_(0, torch.arange(2), 1)
        y.index_add_(0, torch.zeros(2, dtype=torch.int64), torch.ones(2))


@pytest.mark.parametrize("kind", ["u4", "e2m1", "nf4", "e4m3", "i8"])
def test_rows_of_a_quantized_embedding(kind: str) -> None:
    """They are looked up in graphs. What their codes stand for was copied when the largest step was measured."""
    matrix = RandomCoding(Coding(kind, 32)).make(8, 64, torch.device("cpu")).packed()
    rows = torch.arange(3)
    wanted = matrix.take(rows).expand()
    with capturing():
        found = matrix.take(rows).expand()
    assert torch.equal(found, wanted)
