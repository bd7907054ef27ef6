"""Filters and forbidden tokens by Triton kernels against their reference: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvasir.kernels import reference

pytest.importorskip("triton")

from kvasir.kernels.triton.filter_threshold import filter_threshold
from kvasir.kernels.triton.logit_rules import mask_logits
from tests.kernel_builders import DEVICE, GPU

pytestmark = pytest.mark.kernel


# What a line may ask for: temperature, top-k, top-p, min-p.
FILTERS = [(0.7, k, p, m) for k in (0, 1, 40, 4300) for p in (1.0, 0.3, 0.95) for m in (0.0, 0.02)]
FILTERS = [(0.0, 5, 0.5, 0.1), *FILTERS]
KINDS = ["peaked", "plain", "flat", "far off", "uneven"]


def lines_of(kind: str, lines: int, vocab: int) -> torch.Tensor:
    x = torch.randn(lines, vocab, device=DEVICE)
    if kind == "peaked":
        x *= 3
    elif kind == "flat":
        x *= 1e-3
    elif kind == "far off":  # few values that are told apart, none of them near zero
        x = (x * 0.05 + 5).bfloat16()
    elif kind == "uneven":
        x = x**3
        x[:, : vocab // 3] = float("-inf")
    return x


def asking(some: list[tuple[float, int, float, float]], lines: int) -> tuple[torch.Tensor, ...]:
    """Rows of lines that take turns with some filters; temperature, min-p, top-k, top-p."""
    heat, top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*some, strict=True))
    return torch.arange(lines, device=DEVICE) % len(some), heat, min_p, top_k.int(), top_p


# more than fit a list, so that a flat line is searched in several rounds, and more than a chunk
@pytest.mark.parametrize("vocab", [50, 9000, *([151_936] if GPU else [])])
@pytest.mark.parametrize("kind", KINDS)
def test_filter_threshold(kind: str, vocab: int) -> None:
    """Against the reference, which the sampler's tests check: each filter, and all of them."""
    some = FILTERS if GPU else FILTERS[KINDS.index(kind) :: 5]  # the interpreter takes its time
    logits = lines_of(kind, len(some), vocab)
    arguments = (logits, *asking(some, len(some)))
    # What is lighter than this by so much is never drawn, and whether it is kept makes no difference.
    heat = arguments[2][:, None]
    possible = logits.float() > logits.float().amax(1, keepdim=True) - torch.where(heat > 0, 130 * heat, torch.inf)
    possible &= logits > float("-inf")
    kept, wanted = (
        possible & (logits >= f(*arguments)[:, None]) for f in (filter_threshold, reference.filter_threshold)
    )
    for line, (ours, theirs) in enumerate(zip(kept.sum(1).tolist(), wanted.sum(1).tolist(), strict=True)):
        # equal logits go together; a sum that is rounded otherwise may move the edge by a token, of the thousands in a
        # flat line by a few
        ties = int(logits[line].unique(return_counts=True)[1].max()) if kind == "far off" else 1
        assert abs(ours - theirs) <= ties + theirs // 1000, (some[line], ours, theirs)


@pytest.mark.parametrize("find", [filter_threshold, reference.filter_threshold], ids=["kernel", "reference"])
@pytest.mark.parametrize("top_k", [1000, 1025, 1200, 2990])
def test_top_p_is_a_share_of_what_a_large_top_k_left(top_k: int, find: Callable[..., torch.Tensor]) -> None:
    logits = torch.randn(1, 3000, device=DEVICE) * 2
    threshold = find(logits, *asking([(1.5, top_k, 0.8, 0.0)], 1))
    best = logits[0].double().sort(descending=True).values[:top_k]
    wanted = int(((best / 1.5).softmax(0).cumsum(0) < 0.8).sum()) + 1
    assert abs(int((logits >= threshold).sum()) - wanted) <= 1


def test_a_line_is_filtered_alike_in_any_batch() -> None:
    some = [(0.7, 0, 0.9, 0.0), (0.7, 20, 0.9, 0.01)]
    logits = torch.cat([lines_of(kind, 2, 9000) for kind in ("flat", "peaked")])
    rows, *parameters = asking(some, len(logits))
    together = filter_threshold(logits, rows, *parameters)
    for line in range(len(logits)):
        assert filter_threshold(logits[line : line + 1], rows[line : line + 1], *parameters) == together[line]


@pytest.mark.parametrize("vocab", [31, 2050, *([151_936] if GPU else [])])
def test_mask_logits(vocab: int) -> None:
    """By single bits, over the edges of words and blocks; lines whose rows do not ask stay as they are."""
    wide = torch.randn(7, vocab + 5, device=DEVICE)
    allowed = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([9, 3, 3, 0, 8, 2, 9], device=DEVICE)
    slots = torch.tensor([2, -1, 2, -1, 1, -1, -1, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    ours, theirs = wide.clone()[:, :vocab], wide.clone()[:, :vocab]
    mask_logits(ours, rows, slots, allowed)
    reference.mask_logits(theirs, rows, slots, allowed)
    assert torch.equal(ours, theirs)
    for line, slot in {0: 0, 3: 2, 5: 2, 6: 0}.items():
        said = [int(allowed[slot, token // 32]) >> token % 32 & 1 == 1 for token in range(min(vocab, 100))]
        assert (ours[line, :100] > float("-inf")).tolist() == said
    assert torch.equal(ours[[1, 2, 4]], wide[[1, 2, 4], :vocab])
