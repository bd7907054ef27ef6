"""The device sampler against an independent numpy reference: distributions, bans, seeds, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir.kernels.reference import hash_tokens
from kvasir.messages import NewRow, RowSampling
from kvasir.sampling.features import HeadWork, SampledRows
from kvasir.sampling.logprobs import top_logprobs
from kvasir.sampling.sampler import Sampler, SamplingParameters
from tests.pairwise import few

VOCAB = 40


def make_state(*rows: RowSampling) -> SamplingParameters:
    state = SamplingParameters(len(rows), torch.device("cpu"))
    open_rows(state, [NewRow(i, 0, s) for i, s in enumerate(rows)])
    return state


def open_rows(state: SamplingParameters, new_rows: list[NewRow]) -> None:
    state.open(new_rows, torch.tensor([new.row for new in new_rows]), torch.from_numpy(state.pack(new_rows)))


def sample(state: SamplingParameters, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
    work = [HeadWork(state, state.key_for(np.array(rows, np.int32)))]
    next_token = torch.zeros(len(state.seed), dtype=torch.int32)
    step = SampledRows(np.array(rows, np.int32), torch.tensor(rows), torch.tensor(positions))
    tokens, _ = Sampler(state, next_token).sample(logits, step, work)
    assert {int(next_token[row]) for row in rows} <= set(tokens.tolist()), "the rows learn their tokens"
    return tokens.tolist()


def reference(logits: np.ndarray, s: RowSampling) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p, the slow and plain way."""
    p = np.exp((logits - logits.max()) / s.temperature)
    p /= p.sum()
    p[p < s.min_p * p.max()] = 0
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= s.top_p:
            p[token] = 0
        mass += p[token]
    return p / p.sum()


CASES = [
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6),
    RowSampling(temperature=1.3, top_k=5),
    RowSampling(temperature=1.0, top_p=0.7),
    RowSampling(temperature=0.8, min_p=0.1),
    RowSampling(temperature=1.1, top_k=12, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize(
    ("case", "mixed"),
    few(
        [(case, mixed) for case in range(len(CASES)) for mixed in (False, True)],
        fast=[*((case, False) for case in range(len(CASES))), (len(CASES) - 1, True)],
    ),
)
def test_draws_follow_the_distribution(case: int, mixed: bool) -> None:
    torch.manual_seed(case)
    logits = torch.randn(VOCAB) * 2
    draws = 40_000
    rows = CASES if mixed else [CASES[case]]
    at = case if mixed else 0
    state = make_state(*rows)
    lines = [i % len(rows) for i in range(draws * len(rows))] if mixed else [0] * draws
    tokens = np.array(sample(state, logits.expand(len(lines), -1), lines, list(range(len(lines)))))
    counts = np.bincount(tokens[np.array(lines) == at], minlength=VOCAB)
    wanted = reference(logits.double().numpy(), CASES[case]) * draws
    assert (counts[wanted == 0] == 0).all(), "a token outside the allowed set was drawn"
    live = wanted > 5
    chi_square = ((counts - wanted)[live] ** 2 / wanted[live]).sum()
    freedom = live.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5, f"chi-square {chi_square:.0f} at {freedom} degrees"


NUMBERS = RowSampling(temperature=1.0, seed=3), RowSampling(), RowSampling(temperature=0.7, top_k=4, top_p=0.9, seed=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [slice(None), slice(0, 1), slice(VOCAB - 1, None)])
def test_logits_that_are_not_numbers_give_no_token(broken: slice, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB).to(dtype)
    state = make_state(*NUMBERS, *NUMBERS)
    whole = sample(state, logits.clone(), list(range(6)), [5] * 6)
    logits[3:, broken] = torch.nan
    step = SampledRows(np.arange(6, dtype=np.int32), torch.arange(6), torch.full((6,), 5))
    next_token = torch.full((6,), -7, dtype=torch.int32)
    work = [HeadWork(state, state.key_for(step.host_rows))]
    tokens, _ = Sampler(state, next_token).sample(logits, step, work)
    assert tokens.tolist() == [*whole[:3], -1, -1, -1], "neighbours get their tokens"
    assert ((next_token >= 0) & (next_token < VOCAB)).all(), "the next step may read it before the row is ended"


def test_greedy_takes_the_best_whatever_stands_beside_it() -> None:
    state = make_state(RowSampling(), RowSampling(temperature=1.0, top_k=3, seed=5))
    logits = torch.randn(2, VOCAB)
    assert sample(state, logits, [0, 1], [3, 3])[0] == int(logits[0].argmax())


def test_draw_depends_on_seed_position_and_logits_alone() -> None:
    logits = torch.randn(VOCAB)
    seeded = RowSampling(temperature=1.0, top_p=0.9, seed=123)
    alone = sample(make_state(seeded), logits.expand(50, -1), [0] * 50, list(range(50)))
    crowd = make_state(RowSampling(temperature=2.0, seed=9), RowSampling(), seeded)
    others = torch.randn(50, VOCAB)
    for position, token in enumerate(alone):
        lines = torch.stack([others[position], others[position], logits])
        assert sample(crowd, lines, [0, 1, 2], [7, 8, position])[2] == token
    assert len(set(alone)) > 5, "different positions draw differently"


def test_noise_is_uniform_and_independent() -> None:
    """Of its 32 bits the high and the low ones, among neighbours in seed, position and token."""
    seeds, positions = torch.arange(50).repeat_interleave(50), torch.arange(50).repeat(50)
    hashed = hash_tokens(seeds, positions, 64).numpy()
    assert hashed.min() >= 0 and hashed.max() < 1 << 32
    for numbers in (hashed / 2**32, (hashed & 0xFFFF) / 2**16):
        expected = numbers.size / 100
        counts = np.histogram(numbers, 100, (0, 1))[0]
        assert ((counts - expected) ** 2 / expected).sum() < 99 + 5 * np.sqrt(198)
        grid = numbers.reshape(50, 50, 64)
        for axis in range(3):
            sides = (np.moveaxis(grid, axis, 0)[i].ravel() for i in (slice(1, None), slice(None, -1)))
            assert abs(np.corrcoef(*sides)[0, 1]) < 0.02


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Chi-square over one token and over two neighbouring positions, on every version that this machine has."""
    logits, count = torch.tensor([2.0, 0.0, 1.0, -3.0, -torch.inf, 0.5]), 200_000
    state = make_state(RowSampling(temperature=0.8, seed=4))
    probabilities = (logits / 0.8).softmax(0).double()
    joint = (probabilities[:, None] * probabilities).flatten().numpy()
    tokens = np.array(sample(state, logits.expand(count, -1), [0] * count, list(range(count))))
    pairs = tokens[::2] * len(logits) + tokens[1::2]
    for drawn, wanted in ((tokens, probabilities.numpy()), (pairs, joint)):
        expected = wanted * len(drawn)
        counts = np.bincount(drawn, minlength=len(wanted))
        assert counts[wanted == 0].sum() == 0
        chosen = wanted > 0
        distance = ((counts - expected)[chosen] ** 2 / expected[chosen]).sum()
        assert distance < chosen.sum() - 1 + 5 * np.sqrt(2 * chosen.sum())


def test_small_changes_of_the_logits_rarely_change_the_token() -> None:
    """Rounding of another batch size or device is such a change; a walk along the sums of probabilities turned a third
    of the tokens into others."""
    logits = torch.randn(2000, 5000) * 2
    state = make_state(RowSampling(temperature=1.0, seed=3))
    rows, positions = [0] * 2000, list(range(2000))
    before = np.array(sample(state, logits, rows, positions))
    after = np.array(sample(state, logits + 0.01 * torch.randn(2000, 5000), rows, positions))
    assert (before != after).mean() < 0.03


def test_stop_ids_cannot_be_sampled_before_min_tokens() -> None:
    state = make_state(RowSampling(banned_until=5, stop_token_ids=(3, 0, 7)), RowSampling(stop_token_ids=(3,)))
    logits = torch.zeros(VOCAB)
    logits[3], logits[0], logits[7], logits[9] = 9, 8, 7, 6
    lines = logits.expand(3, -1)
    assert sample(state, lines, [0, 0, 1], [4, 5, 4]) == [9, 3, 3]
    assert logits[3] == 9, "the model's logits were changed in place"


def test_row_reused_with_fewer_stop_ids_forgets_the_old_ones() -> None:
    state = make_state(RowSampling(banned_until=9, stop_token_ids=(1, 2, 3)))
    open_rows(state, [NewRow(0, 0, RowSampling(banned_until=9, stop_token_ids=(5,)))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 5] = 4, 5
    assert sample(state, logits, [0], [1]) == [2]


def test_top_p_keeps_at_least_the_best_token() -> None:
    state = make_state(RowSampling(temperature=1.0, top_p=1e-6))
    logits = torch.randn(100, VOCAB)
    assert sample(state, logits, [0] * 100, list(range(100))) == logits.argmax(-1).tolist()


def test_logprobs_do_not_depend_on_other_lines_or_threads() -> None:
    logits, tokens = 3 * torch.randn(100, 60_000), torch.randint(0, 60_000, (100,))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = top_logprobs(logits, tokens, 0).values
        torch.set_num_threads(2)
        assert torch.equal(top_logprobs(logits, tokens, 0).values, wanted)
        alone = [top_logprobs(logits[i : i + 1], tokens[i : i + 1], 0).values for i in range(100)]
        assert torch.equal(torch.cat(alone), wanted)
    finally:
        torch.set_num_threads(before)


def test_logprobs_are_of_the_plain_softmax() -> None:
    logits = torch.randn(6, VOCAB)
    tokens = torch.randint(0, VOCAB, (6,))
    top = top_logprobs(logits, tokens, 4)
    wanted = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(top.values.double(), wanted.gather(1, top.token_ids.long()), atol=1e-5)
    assert top.token_ids[:, 0].tolist() == tokens.tolist()
    assert top.token_ids[:, 1:].tolist() == wanted.topk(4).indices.tolist()
    ranks = [int((wanted[i] > wanted[i, t]).sum()) + 1 for i, t in enumerate(tokens)]
    assert top.ranks.tolist() == ranks
    assert top_logprobs(logits, tokens, 0).token_ids.shape == (6, 1)
