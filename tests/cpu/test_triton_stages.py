"""What few rows ask of sampling, by Triton kernels against their reference: in Triton's interpreter, or on a GPU.

Each is also held against a loop over single numbers, so that the two do not err alike.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.kernels import ANY_TOKEN, reference

pytest.importorskip("triton")

from kvasir.kernels.triton.logit_rules import add_bias, ban_words, count_tokens, penalize, push_tokens
from tests.kernel_builders import DEVICE, GPU

pytestmark = pytest.mark.kernel

VOCABS = [31, 2050, *([151_936] if GPU else [])]
ROWS, SLOTS, LINES = 12, 6, 9


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape).astype(np.int32)).to(DEVICE)


def who_asks(rng: np.random.Generator, lines: int = LINES, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of some lines, each once but for the last, which is padding; and the slots of about half of the rows."""
    slots = np.full(rows, -1, np.int32)
    asking = rng.permutation(rows - 1)[: min(SLOTS, rows // 2)]
    slots[asking] = rng.permutation(SLOTS)[: len(asking)]
    others = rng.permutation(np.setdiff1d(np.arange(rows - 1), asking[:1]))
    chosen = np.concatenate([asking[:1], others[: lines - 3], [rows - 1, rows - 1]])
    return torch.from_numpy(chosen).to(DEVICE), torch.from_numpy(slots).to(DEVICE)


def slots_of(rows: torch.Tensor, slots: torch.Tensor) -> list[int]:
    return slots[rows].tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", VOCABS)
def test_penalize(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, slots = who_asks(rng)
    wide = torch.randn(LINES, vocab + 3, device=DEVICE) * 4
    wide[:, 1] = -torch.inf
    counts = integers(rng, -3, 4, SLOTS, vocab).clamp(min=0)
    in_prompt = integers(rng, 0, 2, SLOTS, vocab).bool()
    presence, frequency = torch.randn(2, SLOTS, device=DEVICE)
    repetition = torch.rand(SLOTS, device=DEVICE) + 0.5
    tables = (counts, in_prompt, presence, frequency, repetition)
    ours, theirs = wide.clone()[:, :vocab], wide.clone()[:, :vocab]
    penalize(ours, rows, slots, *tables)
    reference.penalize(theirs, rows, slots, *tables)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for line, slot in enumerate(slots_of(rows, slots)):
        if slot < 0:
            assert torch.equal(ours[line], wide[line, :vocab]), "a line that did not ask was changed"
            continue
        for token in range(0, vocab, max(1, vocab // 40)):
            x, n = float(wide[line, token]), int(counts[slot, token])
            if n or in_prompt[slot, token]:
                x = x / float(repetition[slot]) if x > 0 else x * float(repetition[slot])
            x -= float(frequency[slot]) * n + float(presence[slot]) * (n > 0)
            assert float(ours[line, token]) == pytest.approx(x, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("lines", [1, 9, 300])
def test_count_tokens(lines: int) -> None:
    rng = np.random.default_rng(lines)
    rows, slots = who_asks(rng, max(lines, 3), rows=lines + 5)
    rows = rows[:lines]
    tokens, counts = integers(rng, 0, 70, lines), integers(rng, 0, 3, SLOTS, 70)
    ours, theirs, wanted = counts.clone(), counts.clone(), counts.tolist()
    count_tokens(tokens, rows, slots, ours)
    reference.count_tokens(tokens, rows, slots, theirs)
    for token, slot in zip(tokens.tolist(), slots_of(rows, slots), strict=True):
        if slot >= 0:
            wanted[slot][token] += 1
    assert ours.tolist() == theirs.tolist() == wanted != counts.tolist()


@pytest.mark.parametrize("width", [1, 5, 128, 300])
@pytest.mark.parametrize("vocab", VOCABS)
def test_add_bias(vocab: int, width: int) -> None:
    """Lists are padded with token 0, which may also be one of theirs."""
    rng = np.random.default_rng(width)
    rows, slots = who_asks(rng)
    wide = torch.randn(LINES, vocab + 3, device=DEVICE)
    ids = np.zeros((SLOTS, width), np.int32)
    values = np.zeros((SLOTS, width), np.float32)
    for slot in range(SLOTS):
        some = rng.permutation(vocab)[: rng.integers(1, min(width, vocab) + 1)]
        some[-1] = 0 if slot % 2 and 0 not in some else some[-1]
        ids[slot, : len(some)], values[slot, : len(some)] = some, rng.normal(0, 3, len(some))
    tables = (torch.from_numpy(ids).to(DEVICE), torch.from_numpy(values).to(DEVICE))
    ours, theirs = wide.clone()[:, :vocab], wide.clone()[:, :vocab]
    add_bias(ours, rows, slots, *tables)
    reference.add_bias(theirs, rows, slots, *tables)
    wanted = wide[:, :vocab].cpu().numpy().copy()
    for line, slot in enumerate(slots_of(rows, slots)):
        if slot >= 0:
            np.add.at(wanted[line], ids[slot], values[slot])
    np.testing.assert_allclose(ours.cpu(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours, wide[:, :vocab])


@pytest.mark.parametrize(("words", "length"), [(1, 1), (3, 2), (140, 4)])
def test_ban_words(words: int, length: int) -> None:
    """Of few tokens, so that words are often begun. Some lists are shorter: nothing matches their rest."""
    rng = np.random.default_rng(words)
    vocab, nothing = 150, -2
    rows, slots = who_asks(rng)
    wide = torch.randn(LINES, vocab + 3, device=DEVICE)
    beginnings, recent = integers(rng, 0, 2, SLOTS, words, length), integers(rng, 0, 2, SLOTS, length)
    recent[1] = -3  # nothing was said yet
    for slot in range(SLOTS):
        for word in range(words):
            beginnings[slot, word, : rng.integers(0, length + 1)] = ANY_TOKEN
    beginnings[:, words - words // 3 :] = nothing
    ends = integers(rng, 0, vocab, SLOTS, words)
    tables = (beginnings, ends, recent)
    ours, theirs = wide.clone()[:, :vocab], wide.clone()[:, :vocab]
    ban_words(ours, rows, slots, *tables)
    reference.ban_words(theirs, rows, slots, *tables)
    wanted, banned = wide[:, :vocab].clone(), 0
    for line, slot in enumerate(slots_of(rows, slots)):
        for word in range(words) if slot >= 0 else ():
            known = zip(beginnings[slot, word].tolist(), recent[slot].tolist(), strict=True)
            if all(own in (ANY_TOKEN, said) for own, said in known):
                wanted[line, ends[slot, word]] = -torch.inf
                banned += 1
    assert banned and torch.equal(ours, wanted) and torch.equal(theirs, wanted)


@pytest.mark.parametrize("length", [1, 2, 16, 129, 300])
def test_push_tokens(length: int) -> None:
    rng = np.random.default_rng(length)
    rows, slots = who_asks(rng)
    tokens, recent = integers(rng, 0, 1000, LINES), integers(rng, 0, 1000, SLOTS, length)
    ours, theirs, wanted = recent.clone(), recent.clone(), recent.tolist()
    push_tokens(tokens, rows, slots, ours)
    reference.push_tokens(tokens, rows, slots, theirs)
    for token, slot in zip(tokens.tolist(), slots_of(rows, slots), strict=True):
        if slot >= 0:
            wanted[slot] = [*wanted[slot][1:], token]
    assert ours.tolist() == theirs.tolist() == wanted != recent.tolist()


@pytest.mark.skipif(not GPU, reason="takes 17 GiB")
def test_slots_far_into_a_table_of_many_tokens() -> None:
    """Where slot times vocabulary does not fit 32 bits."""
    vocab, slot = 151_936, 15_000
    assert slot * vocab > 1 << 31
    rows, slots = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([slot], device=DEVICE).int()
    counts = torch.zeros(slot + 1, vocab, dtype=torch.int32, device=DEVICE)
    in_prompt = torch.zeros(slot + 1, vocab, dtype=torch.bool, device=DEVICE)
    presence, frequency, repetition = torch.ones(3, slot + 1, device=DEVICE)
    token = torch.tensor([vocab - 1], dtype=torch.int32, device=DEVICE)
    count_tokens(token, rows, slots, counts)
    logits = torch.zeros(1, vocab, device=DEVICE)
    penalize(logits, rows, slots, counts, in_prompt, presence, frequency, repetition)
    assert int(counts[slot, -1]) == 1 and float(logits[0, -1]) == -2 and int(logits.count_nonzero()) == 1
