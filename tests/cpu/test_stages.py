"""Each stage of the sampler against a brute-force loop, and all of them mixed in one batch against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.messages import Extras, NewRow, RowSampling
from kvasir.sampling import stages
from kvasir.sampling.features import HeadWork, SampledRows
from kvasir.sampling.logit_rules import BETA, Penalties
from kvasir.sampling.registry import FeatureSettings, make_sampler
from tests.pairwise import few

VOCAB = 24
CPU = torch.device("cpu")


class Bench:
    """A sampler for a few rows, and the slow and plain way to the same distributions."""

    def __init__(self, max_rows: int = 16) -> None:
        self.sampler = make_sampler(FeatureSettings(max_rows, VOCAB, CPU), torch.zeros(max_rows, dtype=torch.int32))
        self.state = self.sampler.parameters
        self.texts: dict[int, tuple[RowSampling, list[int], list[int]]] = {}

    def open(self, *rows: tuple[int, RowSampling, list[int], list[int]]) -> None:
        new = [NewRow(row, 0, s, np.array(prompt + said, np.int32)) for row, s, prompt, said in rows]
        packed = torch.from_numpy(self.state.pack(new))
        self.state.open(new, torch.tensor([row for row, *_ in rows]), packed)
        for row, s, prompt, said in rows:
            self.texts[row] = s, prompt, list(said)

    def step(self, rows: list[int], logits: torch.Tensor) -> tuple[list[int], np.ndarray]:
        """Tokens drawn, and the logits they were drawn from."""
        positions = [len(self.texts[row][1]) + len(self.texts[row][2]) for row in rows]
        step = SampledRows(np.array(rows, np.int32), torch.tensor(rows), torch.tensor(positions))
        work = self.work(np.array(rows, np.int32))
        for stage in self.state.stages._stages:
            assert not stage.capturable or stage.device_slots.tolist() == stage.slots.tolist(), f"slots of {stage}"
        before = logits.clone()
        processed = self.sampler.process(logits, step, work)
        tokens = self.sampler.draw(processed, step, work)
        assert torch.equal(logits, before), "the model's logits were changed in place"
        for call in step.on_host:
            call(tokens.numpy())
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self.texts[row][2].append(token)
        return tokens.tolist(), processed.filtered().numpy()

    def work(self, rows: np.ndarray) -> list[HeadWork]:
        return [HeadWork(self.state, self.state.key_for(rows))]

    def wanted(self, row: int, logits: np.ndarray) -> np.ndarray:
        s, prompt, said = self.texts[row]
        return brute_force(logits, s, prompt, said)


def brute_force(logits: np.ndarray, s: RowSampling, prompt: list[int], said: list[int]) -> np.ndarray:
    x = [float(value) for value in logits]
    e = s.extras or Extras(len(prompt))
    for process in e.processors:
        x = process(prompt, said, torch.tensor(x)).tolist()
    for token, bias in e.logit_bias:
        x[token] += bias
    for token in range(VOCAB):
        if token in prompt or token in said:
            x[token] = x[token] / e.repetition_penalty if x[token] > 0 else x[token] * e.repetition_penalty
        x[token] -= e.frequency_penalty * said.count(token)
        x[token] -= e.presence_penalty * (token in said)
    for token in range(VOCAB):
        if (e.allowed_token_ids and token not in e.allowed_token_ids) or token in e.forbidden_token_ids:
            x[token] = -np.inf
    for *beginning, last in e.bad_words:
        if len(beginning) <= len(said) and said[len(said) - len(beginning) :] == beginning:
            x[last] = -np.inf
    return np.array(x)


def process(prompt: list[int], said: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[sum(said) % VOCAB] += 3.0
    logits[prompt[0]] -= 1.0
    return logits


WISHES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8},
    "all penalties": {"presence_penalty": -0.4, "frequency_penalty": 0.6, "repetition_penalty": 0.7},
    "bias": {"logit_bias": ((3, 2.5), (7, -100.0), (0, 0.3))},
    "allowed": {"allowed_token_ids": (2, 5, 11)},
    "forbidden": {"forbidden_token_ids": (1, 2, 3, 4, 20)},
    "allowed and forbidden": {"allowed_token_ids": (2, 5, 11, 12), "forbidden_token_ids": (5,)},
    "bad words": {"bad_words": ((4,), (1, 2), (2, 2), (7, 8, 9), (0, 1, 2, 3))},
    "processor": {"processors": (process,)},
    "mixed": {"repetition_penalty": 1.2, "logit_bias": ((9, 4.0),), "bad_words": ((9, 9),), "processors": (process,)},
    "nothing": {},
}


def sampling(name: str, num_prompt: int, **changes: Any) -> RowSampling:
    wishes = WISHES[name]
    extras = Extras(num_prompt, **wishes) if wishes else None
    return RowSampling(temperature=1.0, seed=len(name), extras=extras, **changes)


@pytest.mark.parametrize("name", WISHES)
def test_each_stage_equals_brute_force_over_many_steps(name: str) -> None:
    rng = np.random.default_rng(1)
    bench = Bench()
    prompt, said = [1, 1, 6, 2], [2, 5]
    bench.open((3, sampling(name, 4), prompt, said))
    for _ in range(60):
        logits = torch.tensor(rng.normal(0, 2, (1, VOCAB)), dtype=torch.float32)
        wanted = bench.wanted(3, logits[0].numpy())
        _, got = bench.step([3], logits)
        np.testing.assert_allclose(got[0], wanted, atol=1e-5)


def test_all_stages_mixed_in_one_batch_with_rows_coming_and_going() -> None:
    rng = np.random.default_rng(2)
    bench = Bench()
    names = list(WISHES)
    for round_number in range(12):
        fresh = rng.permutation(12)[:5].tolist()
        tenants = []
        for row in fresh:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()
            tenants.append((row, sampling(names[int(rng.integers(len(names)))], len(prompt)), prompt, []))
        bench.open(*tenants)
        for _ in range(6):
            rows = [row for row in bench.texts if rng.random() < 0.7]
            if not rows:
                continue
            logits = torch.tensor(rng.normal(0, 2, (len(rows), VOCAB)), dtype=torch.float32)
            wanted = [bench.wanted(row, logits[i].numpy()) for i, row in enumerate(rows)]
            _, got = bench.step(rows, logits)
            np.testing.assert_allclose(got, np.array(wanted), atol=1e-5, err_msg=f"round {round_number}")


def test_stages_grow_on_first_use_and_give_slots_back() -> None:
    bench = Bench()
    (penalties,) = (stage for stage in bench.state.stages._stages if isinstance(stage, Penalties))
    bench.open(*((row, sampling("nothing", 1), [1], []) for row in range(16)))
    assert len(penalties.counts) == 0 and bench.state.stages.needed(np.arange(16, dtype=np.int32)) == ()
    for _ in range(5):
        for row in range(16):
            bench.open((row, sampling("presence", 1), [1], []))
            bench.open((row, sampling("nothing", 1), [1], []))
    assert len(penalties.counts) == 4
    bench.open(*((row, sampling("presence", 1), [1], []) for row in range(9)))
    assert len(penalties.counts) == 16
    assert bench.state.stages.needed(np.array([9, 10], np.int32)) == ()


@pytest.mark.parametrize("where", ["upload", "_grown"])
def test_memory_that_runs_out_while_rows_open_leaves_nothing_behind(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    (stage,) = (stage for stage in bench.state.stages._stages if isinstance(stage, Penalties))
    bench.open(*((row, sampling("presence", 1), [1], []) for row in range(4)))
    work, calls = getattr(stage, where), iter(range(100))

    def fails_once(*args: Any) -> Any:
        if next(calls) == (where == "_grown"):  # there with the second table
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(*args)

    monkeypatch.setattr(stage, where, fails_once)
    asking = [(row, sampling("presence", 1), [1], [5]) for row in (4, 5, 6)]
    with pytest.raises(torch.OutOfMemoryError):
        bench.open(*asking)
    assert {len(getattr(stage, table)) for table in stage.tables} == {stage._size}
    bench.open((4, sampling("nothing", 1), [1], []), *asking[1:])
    assert sorted(stage._free + stage.slots[[0, 1, 2, 3, 5, 6]].tolist()) == list(range(8))
    logits = torch.randn(3, VOCAB)
    wanted = [bench.wanted(row, logits[row - 4].numpy()) for row in (4, 5, 6)]
    np.testing.assert_allclose(bench.step([4, 5, 6], logits)[1], np.array(wanted), atol=1e-5)


def test_slots_that_could_not_be_sent_for_want_of_memory_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tenant of the row asks for nothing. Bench.step compares what the device knows."""
    bench = Bench()
    bench.open(*((row, sampling("all penalties", 1), [1], [2]) for row in range(3)))

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stages, "upload", fails)
        with pytest.raises(torch.OutOfMemoryError):
            bench.open((1, sampling("nothing", 1), [1], []))
    bench.open((5, sampling("nothing", 1), [1], []), (1, sampling("nothing", 1), [1], []))
    logits = torch.randn(3, VOCAB)
    wanted = [bench.wanted(row, logits[row].numpy()) for row in range(3)]
    np.testing.assert_allclose(bench.step([0, 1, 2], logits)[1], np.array(wanted), atol=1e-5)


def test_slots_of_all_stages_are_sent_at_once_and_only_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    uploads: list[int] = []
    real = stages.upload
    monkeypatch.setattr(stages.Stage, "upload", lambda self, *arrays: real(arrays, CPU))
    monkeypatch.setattr(stages, "upload", lambda arrays, device: (uploads.append(len(arrays)), real(arrays, device))[1])
    bench.open((0, sampling("all penalties", 1), [1], []), (1, sampling("mixed", 1), [1], []))
    bench.open((2, sampling("nothing", 1), [1], []))
    assert uploads == [2 * 3], "rows and slots of bias, penalties and bad words"
    bench.open((1, sampling("nothing", 1), [1], []))
    assert uploads[1:] == [2 * 3]


def test_every_table_that_is_replaced_makes_a_new_version() -> None:
    bench = Bench(max_rows=12)
    stage_of = {type(stage).__name__: stage for stage in bench.state.stages._stages}
    wishes: dict[str, list[dict[str, Any]]] = {
        "Bias": [{"logit_bias": ((1, 1.0),) * n} for n in (1, 1, 3, 4, 5)],
        "BadWords": [{"bad_words": words} for words in (((1,),), ((1, 2),), ((1, 2, 3), (4,)), ((1,),) * 9)],
        "Penalties": [{"presence_penalty": 1.0}] * 5,
        "Bans": [{"forbidden_token_ids": (1,)}] * 5,
    }
    for name, some in wishes.items():
        stage, replaced = stage_of[name], 0
        for row, wish in enumerate(some):
            before = stage.version, [getattr(stage, table) for table in stage.tables]
            bench.open((row, RowSampling(extras=Extras(1, **wish)), [1], []))
            tables = [getattr(stage, table) for table in stage.tables]
            changed = any(old is not new for old, new in zip(before[1], tables, strict=True))
            assert (stage.version > before[0]) == changed
            replaced += changed
        assert 1 < replaced < 5, "they are to grow, and not with every row"
    for row, count in enumerate((1, 3, 4, 9)):
        before = bench.state.version, bench.state.stop_ids
        bench.open((row, RowSampling(banned_until=5, stop_token_ids=tuple(range(count))), [1], []))
        assert (bench.state.version > before[0]) == (bench.state.stop_ids is not before[1]) == (count in (3, 9))


def chi_square(counts: np.ndarray, probs: np.ndarray, draws: int) -> None:
    wanted = probs * draws
    assert (counts[wanted == 0] == 0).all(), "a token outside the allowed set was drawn"
    live = wanted > 5
    value, freedom = ((counts - wanted)[live] ** 2 / wanted[live]).sum(), live.sum() - 1
    assert value < freedom + 5 * np.sqrt(2 * freedom) + 5, f"chi-square {value:.0f} at {freedom} degrees"


@pytest.mark.parametrize(
    ("mixed", "each"), few([(True, 20_000), (True, 100_000), (False, 100_000)], fast=[(True, 20_000)])
)
def test_a_million_draws_follow_the_distribution(mixed: bool, each: int) -> None:
    """Rows that differ in everything, alone or mixed in one batch, 1.2 million draws in all, as many rows of one step;
    a fifth of them in the fast tests."""
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(0, 1.5, VOCAB), dtype=torch.float32)
    names = list(WISHES)
    prompt, said = [1, 1, 6, 2], [2, 5, 9]
    rows = [
        replace(sampling(name, 4), temperature=0.7 + 0.1 * (i % 5), top_k=(0, 9)[i % 2], top_p=(1.0, 0.9, 0.8)[i % 3])
        for i, name in enumerate(names)
    ]
    bench = Bench(max_rows=1200)
    copies = 100  # rows of one kind, which differ by seed
    tenants = [
        (kind * copies + i, replace(s, seed=kind * 1000 + i), prompt, said)
        for kind, s in enumerate(rows)
        for i in range(copies)
    ]
    groups = [tenants] if mixed else [tenants[k * copies : (k + 1) * copies] for k in range(len(rows))]
    counts = np.zeros((len(rows), VOCAB))
    for group in groups:
        for turn in range(each // copies // 50):
            bench.open(*group)  # as if none had drawn yet: the history is part of the distribution
            ids = [row for row, *_ in group] * 50
            step = SampledRows(np.array(ids, np.int32), torch.tensor(ids), torch.arange(len(ids)) + turn * 70_000)
            drawn, _ = bench.sampler.sample(logits.expand(len(ids), -1), step, bench.work(step.host_rows))
            np.add.at(counts, (step.host_rows // copies, drawn.numpy()), 1)
    for kind, s in enumerate(rows):
        x = brute_force(logits.numpy(), s, prompt, said)
        chi_square(counts[kind], filtered(x, s), int(counts[kind].sum()))


def filtered(x: np.ndarray, s: RowSampling) -> np.ndarray:
    p = np.exp((x - x.max()) / s.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= s.top_p]] = 0
    return p / p.sum()


# ---------------------------------------------------------------- Top-EMA


def ema_reference(steps: list[np.ndarray], share: float, depth: int, heat: float) -> list[set[int]]:
    """Which tokens each step keeps, as issue and docs define it."""
    average, kept = None, []
    for x in steps:
        p = np.exp((x - x.max()) / heat)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        mass = p[order[:depth]].sum()
        average = mass if average is None else BETA * average + (1 - BETA) * mass
        goal = min(1.0, max(share, min(1.0, share * average / mass)))
        keep, total = set(), 0.0
        for token in order:
            if total >= goal and goal < 1:
                break
            keep.add(int(token))
            total += p[token]
        kept.append(keep)
    return kept


@pytest.mark.parametrize(("share", "depth", "heat"), [(0.5, 1, 1.0), (0.7, 3, 0.8), (0.9, 5, 1.4), (0.3, 99, 1.0)])
def test_top_ema_keeps_what_its_definition_keeps(share: float, depth: int, heat: float) -> None:
    rng = np.random.default_rng(3)
    steps = [rng.normal(0, [0.3, 1, 3][i % 3], VOCAB).astype(np.float32) for i in range(30)]
    bench = Bench()
    extras = Extras(2, top_ema_p=share, top_ema_d=depth, ema_key=5)
    bench.open((2, RowSampling(temperature=heat, extras=extras), [1, 2], []))
    bench.open((4, RowSampling(temperature=heat), [1, 2], []))
    for x, wanted in zip(steps, ema_reference(steps, share, depth, heat), strict=True):
        _, got = bench.step([4, 2], torch.tensor(np.stack([x, x])))
        assert set(np.flatnonzero(np.isfinite(got[1])).tolist()) == wanted
        assert np.isfinite(got[0]).all(), "a neighbour that did not ask was narrowed"


@pytest.mark.parametrize("dropped", [1, 2])
def test_top_ema_survives_preemption_and_steps_drawn_twice(dropped: int) -> None:
    rng = np.random.default_rng(4)
    steps = [rng.normal(0, [0.3, 3][i % 2], VOCAB).astype(np.float32) for i in range(12)]
    wanted = ema_reference(steps, 0.6, 2, 1.0)
    bench = Bench()
    s = RowSampling(temperature=1.0, extras=Extras(1, top_ema_p=0.6, top_ema_d=2, ema_key=77))
    bench.open((0, s, [1], []))
    for x in steps[:3]:
        bench.step([0], torch.tensor(x[None]))
    known = 3 - dropped  # the others were in flight
    said = bench.texts[0][2][:known]
    bench.open((0, RowSampling(), [3], []), (5, s, [1], said))
    for x, keep in zip(steps[known:], wanted[known:], strict=True):
        _, got = bench.step([5], torch.tensor(x[None]))
        assert set(np.flatnonzero(np.isfinite(got[0])).tolist()) == keep
