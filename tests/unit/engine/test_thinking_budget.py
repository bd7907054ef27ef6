"""Budgets of reasoning: the closing token is forced after exactly so many tokens, alone and around a grammar."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE, guide_argument
from kvasir.engine.guides import BUDGET_GUIDE, BudgetGuide, BudgetGuides, budget_argument, without_jumps
from kvasir.executor.fake import EchoExecutor
from kvasir.frontend.text.grammar import build_grammar
from kvasir.messages import PROMPT_LOGPROBS, EngineRequest, Part, RowSampling, SampleInputs, StepFuture
from kvasir.sampling_params import StructuredOutputsParams
from tests.builders import make_scheduler, run
from tests.grammars import EOS, THINK_END, decode, small_guides, token_id, vocab_size

OPEN, CLOSE = 7, token_id(THINK_END)


def make_core(lookahead: int) -> EngineCore:
    scheduler = make_scheduler(max_model_len=256, num_blocks=256)
    shape = scheduler.rows.tokens.shape
    executor = EchoExecutor(scheduler.cache.block_size, shape[0], shape[1], vocab_size())
    executor.allocate_kv(scheduler.cache.pool.num_blocks, scheduler.cache.tier.num_blocks + 1)
    scheduler.guides.kinds |= {GRAMMAR_GUIDE: small_guides(), BUDGET_GUIDE: BudgetGuides(scheduler.guides)}
    return EngineCore(scheduler, executor, lookahead)


def request(budget: int, inner: Any = None, sampling: RowSampling | None = None) -> EngineRequest:
    guide = (BUDGET_GUIDE, budget_argument(budget, OPEN, CLOSE, True, inner))
    sampling = sampling or RowSampling(stop_token_ids=(token_id(EOS),))
    return EngineRequest(0, np.array([5, 6, OPEN], np.int32), 60, sampling, guide=guide)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_reasoning_ends_after_the_budget(lookahead: int, budget: int) -> None:
    core = make_core(lookahead)
    core.add(request(budget))
    tokens = run(core).tokens[0]
    assert tokens.index(CLOSE) <= budget
    free = make_core(lookahead)
    free.add(request(1000))
    if budget:  # until then nothing is changed
        assert tokens[:budget] == run(free).tokens[0][:budget] or CLOSE in tokens[:budget]


@pytest.mark.parametrize("jumps", [False, True])
def test_a_grammar_begins_where_the_budget_ends(jumps: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    grammar = build_grammar(StructuredOutputsParams(json=schema)).text
    core = make_core(1)
    core.add(request(4, (GRAMMAR_GUIDE, guide_argument(grammar, gate=CLOSE, jumps=jumps))))
    tokens = run(core).tokens[0]
    end = tokens.index(CLOSE)
    assert end <= 4 and json.loads(decode(tokens[end + 1 :])) == {"a": "x"}


def test_without_jumps_the_closing_token_is_sampled() -> None:
    """So that it has log-probabilities like others."""
    grammar = guide_argument("start: /x/")
    argument = budget_argument(2, OPEN, CLOSE, True, (GRAMMAR_GUIDE, grammar))
    name, plain = without_jumps((BUDGET_GUIDE, argument))
    assert name == BUDGET_GUIDE and not plain["jumps"] and not plain["inner"][1]["jumps"]
    assert argument["jumps"] and grammar["jumps"], "the request's own guide is left as it is"
    guide = BudgetGuide(1, OPEN, CLOSE, begun=True, jumps=False)
    guide.accept([11])
    assert guide.is_spent and guide.jump(1, 10, ()) == []
    assert BudgetGuides(make_core(0).scheduler.guides).answers([guide]) == [CLOSE]


@pytest.mark.parametrize("jumps", [False, True])
def test_what_comes_with_a_token_is_kept_when_the_guide_adds_others(jumps: bool) -> None:
    """The first token brings the log-probabilities of the prompt. After it the guide takes over, which makes the sample
    of the step in flight invalid, and nothing else. The request does not stream its tokens."""
    core = make_core(1)
    sample, number = core.executor.sample, count()

    def with_scores(inputs: SampleInputs | None = None) -> StepFuture:
        future = sample(inputs)
        if next(number) == 0:
            future.result().parts[PROMPT_LOGPROBS] = Part(np.zeros(1, np.int32))
        return future

    core.executor.sample = with_scores  # type: ignore[method-assign]
    guide = BUDGET_GUIDE, budget_argument(1, OPEN, CLOSE, True, None, jumps=jumps)
    core.add(replace(request(1), guide=guide, stream=False, max_tokens=5))
    outputs = [core.run_step() for _ in range(3)]
    assert [output.keys.tolist() for output in outputs if PROMPT_LOGPROBS in output.parts] == [[0]]
    assert run(core).tokens[0][1] == CLOSE


def test_a_guide_that_fails_when_it_takes_over_ends_the_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a token more, which nothing would hold to its rules."""

    def fail(self: BudgetGuide, *given: Any, **more: Any) -> list[int]:
        self.error = "it cannot go on" if self.is_spent else None
        return []

    monkeypatch.setattr(BudgetGuide, "jump", fail)
    core = make_core(1)
    core.add(request(2))
    found = run(core)
    assert found.errors[0] == "it cannot go on" and len(found.tokens[0]) == 2


def test_the_guide_counts_from_the_opening_token() -> None:
    guide = BudgetGuide(2, OPEN, CLOSE, begun=False)
    guide.accept([11, 12, 13])
    assert not guide.holds, "reasoning is not open"
    guide.accept([OPEN, 11])
    assert not guide.holds
    guide.accept([12])
    assert guide.holds and guide.is_spent
    assert guide.jump(2, 10, ()) == [], "one token is not worth a jump here"
    assert guide.jump(1, 10, ()) == [CLOSE]
    assert not guide.holds
    guide.accept([OPEN, 11, 12, 13])
    assert not guide.holds, "it opens once"
