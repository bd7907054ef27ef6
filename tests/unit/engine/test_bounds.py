"""Steps that yield none, one or several tokens per row: plans are upper bounds, and results settle them.

The device of numpy drafts tokens itself, some of them wrong, and keeps as many as are right. Whatever it accepts, the
text must be that of one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.engine.guides import Answer, GuideKind, TokenGuide
from kvasir.errors import RequestError
from kvasir.executor.fake import EchoExecutor, FakeFuture, echo_next
from kvasir.messages import FinishReason, SampleInputs, StepPlan, StepResult
from tests.builders import VOCAB, Collector, check_blocks, expected, make_core, request, run


class DraftingEcho(EchoExecutor):
    """Drafts every token that a plan has room for. `luck` is the share of drafts that are right."""

    def __init__(self, *args: Any, luck: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.luck = luck
        self.random = np.random.default_rng(0)
        self.drafts: dict[int, list[int]] = {}  # by line of the plan
        self.num_drafted = self.num_accepted = 0

    def execute(self, plan: StepPlan) -> None:
        """Write drafts as if they were known tokens, then subtract them from the lengths again."""
        given, at = plan.token_ids.copy(), 0
        self.drafts = {}
        ends = np.cumsum(plan.num_tokens)
        text_before = {row: int(self.computed[row]) for row in plan.rows.tolist()}
        for new in plan.new_rows:
            text_before[new.row] = new.num_computed
        super().execute(_without_drafts(plan))
        for line, (row, count, end) in enumerate(zip(plan.rows, plan.num_tokens, ends, strict=True)):
            own = given[at:end]
            num_drafts = int((own[1:] < 0).sum())
            length = text_before[int(row)] + int(count) - num_drafts
            self.drafts[line] = self._draft(int(row), length, num_drafts)
            at = int(end)

    def _draft(self, row: int, length: int, count: int) -> list[int]:
        drafts: list[int] = []
        for offset in range(count):
            right = echo_next([*self._read(0, row, length), *drafts], self.vocab)
            drafts.append(right if self.random.random() < self.luck else (right + 1) % self.vocab)
            for table in self.tables:
                position = length + offset
                self.pages[table[row, position // self.block_size], position % self.block_size] = drafts[-1]
        self.num_drafted += count
        return drafts

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan = self._plan
        assert plan is not None
        width = 1 + max(map(len, self.drafts.values()), default=0)
        tokens, counts = np.zeros((len(plan.rows), width), np.int32), np.zeros(len(plan.rows), np.int32)
        for line in np.flatnonzero(plan.samples).tolist():
            row = int(plan.rows[line])
            length = int(self.computed[row])
            for draft in [*self.drafts[line], None]:
                right = echo_next(self._read(0, row, length), self.vocab)
                tokens[line, counts[line]] = self.next_token[row] = right
                counts[line] += 1
                if draft != right:
                    break
                length += 1
            self.num_accepted += int(counts[line]) - 1
            self.computed[row] = length
        return FakeFuture(StepResult(tokens, counts))


def _without_drafts(plan: StepPlan) -> StepPlan:
    """Return the plan without drafts: only the first token of a row and tokens from the host."""
    keep, counts, at = [], [], 0
    for count in plan.num_tokens.tolist():
        own = plan.token_ids[at : at + count]
        real = [i for i, token in enumerate(own) if i == 0 or token >= 0]
        keep += [at + i for i in real]
        counts.append(len(real))
        at += count
    return replace(plan, token_ids=plan.token_ids[keep], num_tokens=np.array(counts, np.int32))


def drafting_core(lookahead: int = 1, luck: float = 0.7, **options: Any) -> tuple[EngineCore, DraftingEcho]:
    windows = options.get("windows", (None,))
    device = DraftingEcho(options.get("block_size", 4), 8, options.get("max_model_len", 64), VOCAB, windows, luck=luck)
    device.allocate_kv(options.get("num_blocks", 32))
    return make_core(lookahead, device, **options), device


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_drafts_do_not_change_the_text(lookahead: int, luck: float) -> None:
    core, device = drafting_core(lookahead, luck)
    prompts = {key: [key, 3, 5, 7][: key + 1] for key in range(4)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 20 + key, num_drafts=key))
    got = run(core)
    assert got.tokens == {key: expected(prompt, 20 + key) for key, prompt in prompts.items()}
    assert set(got.reasons.values()) == {FinishReason.LENGTH}
    assert device.num_drafted > 0 and (device.num_accepted > 0) == (luck > 0)
    assert core.stats().num_used_blocks == 0


def test_accepted_drafts_save_steps() -> None:
    core, device = drafting_core(1, luck=1.0)
    core.add(request(0, [1, 2], 40, num_drafts=3))
    assert run(core).tokens[0] == expected([1, 2], 40)
    assert core.stats().steps <= 15 and device.num_accepted >= 29


def test_a_stop_token_among_accepted_drafts_ends_the_request() -> None:
    text = expected([1, 2], 12)
    core, _ = drafting_core(1, luck=1.0)
    core.add(request(0, [1, 2], 30, stop=(text[7],), num_drafts=5))
    got = run(core)
    first = text.index(text[7])
    assert got.tokens[0] == text[: first + 1] and got.reasons[0] is FinishReason.STOP


@settings(max_examples=30)
@given(
    load=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 24), st.integers(0, 4)),
        min_size=2,
        max_size=6,
    ),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 1, 1]),
    windows=st.sampled_from([(None,), (None, 5)]),
    spare=st.integers(0, 6),
    luck=st.sampled_from([0.3, 0.8, 1.0]),
)
def test_drafts_in_a_crowded_pool_give_the_same_text_as_running_alone(
    load: list[tuple[list[int], int, int]],
    block_size: int,
    budget: int,
    caching: bool,
    lookahead: int,
    windows: tuple[int | None, ...],
    spare: int,
    luck: float,
) -> None:
    longest = max(len(prompt) + count for prompt, count, _ in load)
    needed = -(-longest // block_size) * len(windows)
    core, device = drafting_core(
        lookahead, luck, num_blocks=needed + 1 + spare, block_size=block_size, budget=budget, caching=caching,
        windows=windows, max_model_len=64,
    )  # fmt: skip
    for key, (prompt, count, drafts) in enumerate(load):
        core.add(request(key, prompt, count, num_drafts=drafts))
    collector, steps = Collector(), 0
    while core.has_work():
        collector.take(core.run_step())
        check_blocks(core)
        steps += 1
        assert steps < 3000, "the engine does not finish"
    assert collector.tokens == {key: expected(prompt, count) for key, (prompt, count, _) in enumerate(load)}
    for name, count in {
        "preempted": core.stats().preemptions,
        "rejected": device.num_drafted - device.num_accepted,
        "freed": core.stats().freed_blocks,
    }.items():
        if count:
            event(name)


# ---------------------------------------------------------------- guides


class OnlyEven(TokenGuide):
    """Allows even tokens, and only 11 after a multiple of eight. Records the tokens that it sees."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def accept(self, token_ids: Sequence[int]) -> None:
        self.seen += token_ids

    def next_token(self) -> Answer:
        if self.seen and self.seen[-1] % 8 == 0:
            return 11
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in range(0, VOCAB, 2):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)


def guided_text(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        token = echo_next(text, VOCAB)
        while token % 2:
            token = (token + 1) % VOCAB
        text.append(11 if len(text) > len(prompt) and text[-1] % 8 == 0 else token)
    return text[len(prompt) :]


class Evens(GuideKind):
    """The kind of guides named "even"."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}  # the tokens that each guide has seen, by its argument

    def make(self, argument: int) -> OnlyEven:
        return OnlyEven(self.seen.setdefault(argument, []))


def even_core(*args: Any, **settings: Any) -> tuple[EngineCore, dict[int, list[int]]]:
    core, kind = make_core(*args, **settings), Evens()
    core.scheduler.guides.kinds["even"] = kind
    return core, kind.seen


@pytest.mark.parametrize("lookahead", [0, 1])
def test_guided_rows_sample_what_their_guide_allows(lookahead: int) -> None:
    core, shown = even_core(lookahead, num_blocks=24)
    prompts = {key: [key, 2, 9] * (key + 1) for key in range(4)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 25, guide=("even", key) if key % 2 else None))
    got = run(core)
    for key, prompt in prompts.items():
        wanted = guided_text(prompt, 25) if key % 2 else expected(prompt, 25)
        assert got.tokens[key] == wanted
        if key % 2:
            assert shown[key] == wanted, "each token is passed to the guide once"
    assert any(11 in got.tokens[key] for key in (1, 3)), "some token was forced"


def test_forward_passes_of_guided_steps_are_launched_before_the_last_result_is_read() -> None:
    core, _ = even_core(1)
    log: list[str] = []
    execute, sample, update = core.executor.execute, core.executor.sample, core.scheduler.update
    core.executor.execute = lambda plan: (log.append("execute"), execute(plan))  # type: ignore[method-assign,assign]
    core.executor.sample = lambda inputs=None: (log.append("sample"), sample(inputs))[1]  # type: ignore[method-assign]
    core.scheduler.update = lambda result: (log.append("update"), update(result))[1]  # type: ignore[method-assign]
    core.add(request(0, [1, 2], 6, guide=("even", 0)))
    run(core)
    assert log[:8] == ["execute", "sample", "execute", "update", "sample", "execute", "update", "sample"]
    log.clear()
    core.add(request(1, [1, 2], 6))
    run(core)
    assert log[:7] == ["execute", "sample", "execute", "sample", "update", "execute", "sample"]


def test_preempted_guided_requests_resume_with_the_state_of_their_guide() -> None:
    core, shown = even_core(1, num_blocks=10, block_size=4, caching=False)
    for key in range(3):
        core.add(request(key, [key, 2, 3], 20, guide=("even", key)))
    got = run(core)
    assert core.stats().preemptions > 0
    for key in range(3):
        assert got.tokens[key] == guided_text([key, 2, 3], 20)
        assert shown[key] == got.tokens[key][: len(shown[key])]


def test_an_unregistered_guide_is_refused() -> None:
    core = make_core()
    with pytest.raises(RequestError, match="no guide is registered under the name 'grammar'"):
        core.add(request(0, [1], 3, guide=("grammar", "{}")))
    assert not core.has_work()
