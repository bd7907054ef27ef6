"""Requests that are held to grammars, on the fake device: what they write is what masking alone gives, in fewer passes.

The fake model takes the next allowed token after a hash of the sequence, so every token depends on all before it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvasir.engine import grammar_guide
from kvasir.engine.core import EngineCore
from kvasir.engine.grammar_compile import CompiledGrammars
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE, GrammarGuides, guide_argument
from kvasir.errors import RequestError
from kvasir.executor.fake import EchoExecutor, echo_next
from kvasir.frontend.text.grammar import JsonStyle, build_grammar
from kvasir.messages import EngineRequest, Extras, FinishReason, RowSampling
from kvasir.sampling_params import StructuredOutputsParams
from tests.builders import Collector, check_blocks, make_scheduler, run
from tests.grammars import (
    CALL,
    EOS,
    THINK_END,
    decode,
    masked_text,
    schemas,
    small_guides,
    small_tokenizer,
    token_id,
    vocab_size,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}, "city": {"enum": ["Paris"]}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def grammar_of(**given: Any) -> str:
    return build_grammar(StructuredOutputsParams(**given)).text


def make_core(lookahead: int = 1, **settings: Any) -> EngineCore:
    scheduler = make_scheduler(**{"max_model_len": 256, "num_blocks": 256, **settings})
    shape = scheduler.rows.tokens.shape
    executor = EchoExecutor(scheduler.cache.block_size, shape[0], shape[1], vocab_size())
    executor.allocate_kv(scheduler.cache.pool.num_blocks, scheduler.cache.tier.num_blocks + 1)
    core = EngineCore(scheduler, executor, lookahead)
    core.scheduler.guides.kinds[GRAMMAR_GUIDE] = small_guides()
    return core


def request(key: int, prompt: list[int], max_tokens: int, grammar: str = "", **options: Any) -> EngineRequest:
    fields = {name: options.pop(name) for name in ("stream", "forks", "sampling") if name in options}
    fields.setdefault("sampling", RowSampling(stop_token_ids=(token_id(EOS),)))
    guide = (GRAMMAR_GUIDE, guide_argument(grammar, **options))
    return EngineRequest(key, np.array(prompt, np.int32), max_tokens, guide=guide, **fields)


def test_forced_tokens_take_no_pass_of_their_own() -> None:
    grammar, counts = grammar_of(json=PERSON), {}
    for lookahead in (0, 1):
        for jumps in (False, True):
            core = make_core(lookahead)
            core.add(request(0, [5, 6, 7], 100, grammar, jumps=jumps))
            got, stats = run(core), core.stats()
            assert got.tokens[0] == masked_text([5, 6, 7], grammar, 100)
            assert got.reasons[0] == FinishReason.STOP
            jsonschema.validate(json.loads(decode(got.tokens[0])), PERSON)
            assert stats.guided_tokens == stats.generated_tokens == len(got.tokens[0])
            assert (stats.jumps > 0) == (stats.jumped_tokens > 0) == jumps
            counts[lookahead, jumps] = stats.guided_passes
    assert counts[0, False] == len(got.tokens[0]), "without jumps every token has its pass, and the end has none"
    assert counts[0, True] < 0.7 * counts[0, False]
    assert counts[0, True] < counts[1, True] < counts[1, False]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_end_takes_no_pass_and_no_token(lookahead: int) -> None:
    core = make_core(lookahead)
    core.add(request(0, [1, 2], 20, grammar_of(choice=["yes"])))
    got = run(core)
    assert decode(got.tokens[0]) == "yes" and token_id(EOS) not in got.tokens[0]
    assert got.reasons[0] == FinishReason.STOP
    assert core.stats().guided_passes <= 1 + lookahead, "all but the last token join the prompt"


def test_a_forced_beginning_joins_the_prompt_and_is_no_cached_prompt_token() -> None:
    grammar = grammar_of(regex="Once upon a time there was a [a-z]{3}")
    core = make_core(1, block_size=4)
    for key in range(2):
        core.add(request(key, [9, 8, 7, 6, 5], 60, grammar))
        got = run(core)
        assert got.tokens[key] == masked_text([9, 8, 7, 6, 5], grammar, 60)
        assert got.cached[key] <= 5
    assert got.cached[1] >= 4, "the second request finds the prompt"


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_max_tokens_cuts_jumps(most: int, lookahead: int) -> None:
    grammar = grammar_of(json=PERSON)
    core = make_core(lookahead)
    core.add(request(0, [3], most, grammar))
    core.add(request(1, [3], most, grammar, stream=False))
    got = run(core)
    for key in range(2):
        assert got.tokens[key] == masked_text([3], grammar, most) and got.reasons[key] == FinishReason.LENGTH


def test_an_end_that_the_grammar_does_not_allow_is_an_error() -> None:
    """Where other rules forbid all that a grammar allows, the sampler has nothing to choose from."""
    core = make_core(0)
    guides = core.scheduler.guides.kinds[GRAMMAR_GUIDE]
    guides.answers = lambda asked: [token_id(EOS)] * len(asked)  # type: ignore[method-assign]
    core.add(request(0, [3], 50, grammar_of(json=PERSON)))
    got = run(core)
    assert got.reasons[0] == FinishReason.ERROR and "no longer be held" in str(got.errors[0])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("jumps", [False, True])
def test_a_complete_answer_of_max_tokens_has_stopped(lookahead: int, jumps: bool) -> None:
    grammar = grammar_of(json=PERSON)
    whole = masked_text([3], grammar, 100)
    core = make_core(lookahead)
    core.add(request(0, [3], len(whole), grammar, jumps=jumps))
    core.add(request(1, [3], len(whole) - 1, grammar, jumps=jumps))
    got = run(core)
    assert got.tokens[0] == whole and got.reasons[0] == FinishReason.STOP
    assert got.tokens[1] == whole[:-1] and got.reasons[1] == FinishReason.LENGTH


def test_a_stop_token_among_forced_ones_ends_the_request() -> None:
    grammar = grammar_of(regex="Once upon a time there was a [a-z]{3}")
    whole = masked_text([4], grammar, 60)
    stop = whole[6]
    core = make_core(1)
    core.add(request(0, [4], 60, grammar, sampling=RowSampling(stop_token_ids=(stop,))))
    got = run(core)
    assert got.tokens[0] == whole[: whole.index(stop) + 1] and got.reasons[0] == FinishReason.STOP


def test_several_completions_share_the_prompt_and_their_forced_beginning() -> None:
    grammar = grammar_of(json=PERSON)
    core = make_core(1)
    prompt = [7] * 9
    forks = tuple(request(key, prompt, 80, grammar) for key in (1, 2))
    core.add(request(0, prompt, 80, grammar, forks=forks))
    got = run(core)
    assert core.stats().shared_blocks > 0
    assert got.tokens[0] == got.tokens[1] == got.tokens[2] == masked_text(prompt, grammar, 80)


def test_running_requests_do_not_share_a_lexer() -> None:
    core, grammar = make_core(), grammar_of(regex="[a-c]{2}(xyz)?[0-9]{30}")
    guides = core.scheduler.guides.kinds[GRAMMAR_GUIDE]
    assert isinstance(guides, GrammarGuides)
    prompts = {key: [key, 4] for key in range(6)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 60, grammar))
    got, lexers = Collector(), guides.lexers(grammar)
    while core.has_work():
        got.take(core.run_step())
        while lexers._num_ordered:
            time.sleep(0.001)
    assert got.tokens == {key: masked_text(prompt, grammar, 60) for key, prompt in prompts.items()}
    assert lexers.num_idle == len(lexers) == 6, "as many as ran at a time"


@pytest.mark.parametrize("batch", [4, 64])
@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_many_rows_are_asked_at_once(monkeypatch: pytest.MonkeyPatch, lookahead: int, jumps: bool, batch: int) -> None:
    monkeypatch.setattr(grammar_guide, "_BATCH", batch)
    core = make_core(lookahead, max_num_seqs=24)
    grammars = [
        grammar_of(json=PERSON),
        grammar_of(regex="[a-f]{3,9}(, and so on){1,3}"),
        grammar_of(choice=["a", "abc"]),
    ]
    prompts = {key: [key, 4, 7] for key in range(20)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 30 + key, grammars[key % 3], jumps=jumps))
    got = run(core)
    assert got.tokens == {key: masked_text(prompt, grammars[key % 3], 30 + key) for key, prompt in prompts.items()}
    assert bool(core.stats().jumps) == jumps


@pytest.mark.parametrize("then", ["accept", "jump", "ready", "nothing"])
def test_matchers_are_left_alone_until_their_masks_are_computed(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    guides, grammar = small_guides(), grammar_of(regex="[a-c][0-9]{4}xyz")
    made, compute, done = [guides.make(guide_argument(grammar)) for _ in range(4)], guides._compute, []

    def slowly(matchers: Any) -> None:
        compute(matchers)
        time.sleep(0.05)
        done.append(len(matchers))

    monkeypatch.setattr(guides, "_compute", slowly)
    guides.ready(made)
    assert not done
    if then == "jump":
        assert made[0].jump(1, 9, ()) == []
    elif then == "accept":
        guides.accept(made[:1], [[token_id("a")]])
    elif then == "ready":
        guides.ready(made[:1])
    assert done == ([] if then == "nothing" else [4])
    masks, places = guides.answers(made)
    for guide, mask in zip(made, masks[places], strict=True):
        assert mask.tobytes() == guide.matcher.compute_bitmask()[: mask.nbytes]


def test_masks_are_answers_in_any_order_also_where_guides_have_left_between() -> None:
    guides, grammar = small_guides(), grammar_of(regex="[a-c][0-9]{4}xyz|[d-f]{7}")
    made = [guides.make(guide_argument(grammar)) for _ in range(6)]
    tokens = [token_id(each) for each in "abcdef"]
    guides.accept(made, [[token] for token in tokens])
    guides.ready(made)
    made[1].accept([token_id("1")])
    assert made[1].mask_line is None and made[2].mask_line is not None
    asked = [made[5], made[0], made[1], made[4]]  # the third and the fourth have left
    first, places = guides.answers(asked[:3])
    second, place = guides.answers(asked[3:])
    masks = [*first[places], *second[place]]
    for guide, mask in zip(asked, masks, strict=True):
        assert mask.tobytes() == guide.matcher.compute_bitmask()[: mask.nbytes]
    assert len(first) == 3 and len(second) == 1
    guides.used_up()
    again, places = guides.answers(made)
    for guide, mask in zip(made, again[places], strict=True):
        assert mask.tobytes() == guide.matcher.compute_bitmask()[: mask.nbytes]


def test_rows_without_a_guide_are_not_asked_and_not_changed() -> None:
    grammar = grammar_of(json=PERSON)
    core = make_core(1)
    core.add(request(0, [1, 2, 3], 80, grammar))
    core.add(EngineRequest(1, np.array([4, 5, 6], np.int32), 40))
    alone = make_core(1)
    alone.add(EngineRequest(1, np.array([4, 5, 6], np.int32), 40))
    assert run(core).tokens[1] == run(alone).tokens[1]
    assert alone.stats().guided_steps == 0 < core.stats().guided_steps


# ---------------------------------------------------------------- where a constraint begins


def gated_text(prompt: list[int], gate: int, grammar: str, max_tokens: int, tagged: bool = False) -> list[int]:
    """What the fake model writes freely up to the gate, and then masked; after a tag it is free again."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(echo_next([*prompt, *tokens], vocab_size()))
        if tokens[-1] == token_id(EOS):
            break
        if tokens[-1] == gate:
            tokens += masked_text([*prompt, *tokens], grammar, max_tokens - len(tokens))
            if not tagged:
                break
    return tokens


def prompt_that_writes(token: int, before: int = 40) -> list[int]:
    """A prompt after which the fake model writes this token soon, but not at once."""
    for first in range(10_000):
        tokens = [first % vocab_size(), first // vocab_size()]
        written: list[int] = []
        while len(written) < before and token_id(EOS) not in written:
            written.append(echo_next([*tokens, *written], vocab_size()))
            if written[-1] == token:
                if len(written) > 2:
                    return tokens
                break
    raise AssertionError("no prompt found")


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("given", [{"json": PERSON}, {"regex": "[a-z ]{4}[0-9]"}])
def test_a_constraint_begins_after_its_gate(lookahead: int, others: bool, jumps: bool, given: dict[str, Any]) -> None:
    """Also if the token after it was sampled before the host knew of the gate, or if another row made the step wait."""
    gate, grammar = token_id(THINK_END), grammar_of(**given)
    prompt = prompt_that_writes(gate)
    core = make_core(lookahead, block_size=4)
    core.add(request(0, prompt, 120, grammar, gate=gate, jumps=jumps))
    if others:
        core.add(request(1, [3, 3], 120, grammar_of(regex="[a-z]{100}")))
    got = run(core)
    wanted = gated_text(prompt, gate, grammar, 120)
    assert gate in wanted and got.tokens[0] == wanted
    assert got.reasons[0] == FinishReason.STOP
    check_blocks(core)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_tags_hold_the_text_after_their_trigger_only(lookahead: int) -> None:
    trigger, grammar = token_id(CALL), grammar_of(regex="[a-z]{2}\\([0-9]\\)")
    prompt = prompt_that_writes(trigger)
    core = make_core(lookahead)
    core.add(request(0, prompt, 60, tags=[(trigger, grammar)]))
    got = run(core)
    wanted = gated_text(prompt, trigger, grammar, 60, tagged=True)
    assert got.tokens[0] == wanted and trigger in wanted[:-5]
    assert core.stats().guided_steps < core.stats().steps, "free text waits for no mask"


# ---------------------------------------------------------------- compiled off the loop


def slow_core() -> tuple[EngineCore, CompiledGrammars]:
    """A core that takes a moment to compile a grammar."""
    core, guides = make_core(1), small_guides()
    core.scheduler.guides.kinds[GRAMMAR_GUIDE] = guides
    submit = guides.compiled._pool.submit

    def slowly(work: Any) -> Any:
        return submit(lambda: (time.sleep(0.2), work())[1])

    guides.compiled._pool.submit = slowly  # type: ignore[method-assign,assignment]
    return core, guides.compiled


def test_a_request_waits_for_its_grammar_outside_the_queue_while_others_run() -> None:
    core, compiled = slow_core()
    core.add(request(0, [1], 60, grammar_of(json=PERSON)))
    core.add(request(2, [1], 60, grammar_of(regex="a{7}")))
    core.add(EngineRequest(1, np.array([4, 5], np.int32), 5))
    assert len(core.pending.requests) == 2 and core.stats().num_waiting == 3 and core.abort(2) and not core.abort(2)
    got, done = Collector(), []
    while core.has_work():
        got.take(core.run_step())
        done += [key for key in got.reasons if key not in done]
    assert done == [1, 0], "the free request did not wait"
    assert compiled.num_compiled == 2
    core.add(request(3, [1], 60, grammar_of(json=PERSON)))
    assert len(core.pending.requests) == 0 and compiled.num_compiled == 2, "equal grammars are compiled once"
    run(core)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    core, _ = slow_core()
    bad = '{"grammars":[{"lark_grammar":"start: nothing"}]}'
    core.add(request(0, [1], 60, bad, forks=(request(2, [1], 60, bad),)))
    core.add(request(1, [1], 60, grammar_of(json=PERSON)))
    got = run(core)
    assert got.reasons[0] == got.reasons[2] == FinishReason.ERROR and "nothing" in str(got.errors[0])
    assert got.reasons[1] == FinishReason.STOP
    with pytest.raises(RequestError, match="nothing"):
        core.add(request(3, [1], 60, bad))


class _Faulty:
    """A matcher whose library reaches a limit, or fails, where it did not before."""

    def __init__(self, matcher: Any, where: str) -> None:
        self._matcher, self._where = matcher, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name) if name != self._where else self._fail

    def _fail(self, *given: Any) -> int:
        if self._where == "try_consume_tokens":
            return 0
        raise RuntimeError("the library is broken")


@pytest.mark.parametrize(
    "where", ["make", "compute_ff_tokens", "try_consume_tokens", "consume_token", "unsafe_compute_mask_ptr"]
)
@pytest.mark.parametrize("start", ["", "[a-c]{3}"])
def test_a_matcher_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch, where: str, start: str) -> None:
    """Without a free start, tokens are forced from the first on."""
    core, _ = slow_core()
    grammar, make = grammar_of(regex=f"{start}1234"), GrammarGuides.make

    def make_faulty(self: GrammarGuides, argument: Any) -> Any:
        guide = make(self, argument)
        if argument["grammar"] == grammar:
            assert where != "make", "the guide cannot be made"
            guide.matcher = _Faulty(guide.matcher, where)
            guide._taken_in = None  # it keeps this matcher
        return guide

    monkeypatch.setattr(GrammarGuides, "make", make_faulty)
    core.add(request(0, [1], 60, grammar, forks=(request(3, [1], 60, grammar),)))
    core.add(request(1, [1], 60, grammar_of(regex="[d-f]{9}")))
    core.add(EngineRequest(2, np.array([1, 2], np.int32), 9))
    got = run(core)
    assert got.reasons[1] == FinishReason.STOP and len(got.tokens[2]) == 9
    if where in ("make", "compute_ff_tokens", "try_consume_tokens") or start:
        assert got.reasons[0] == got.reasons[3] == FinishReason.ERROR
    check_blocks(core)


def test_a_grammar_beyond_the_librarys_limits_is_refused_or_ends_its_request() -> None:
    """So many alternatives may be compiled, but not followed."""
    core, _ = slow_core()
    grammar = grammar_of(grammar="start: " + " | ".join(f'"a{i}"' for i in range(12_000)))
    core.add(request(0, [1], 60, grammar))
    core.add(request(1, [1], 60, grammar_of(json=PERSON)))
    got = run(core)
    assert got.reasons[0] == FinishReason.ERROR and "10000" in str(got.errors[0])
    assert got.reasons[1] == FinishReason.STOP


# ---------------------------------------------------------------- penalties, whose history the worker keeps


def test_a_row_with_a_history_is_described_again_after_a_jump() -> None:
    core, plans = make_core(1), []
    execute = core.executor.execute
    core.executor.execute = lambda plan: (plans.append(plan), execute(plan))[1]  # type: ignore[method-assign]
    sampling = RowSampling(stop_token_ids=(token_id(EOS),), extras=Extras(2, presence_penalty=1.0))
    core.add(request(0, [1, 2], 80, grammar_of(json=PERSON), sampling=sampling))
    got = run(core)
    described = [new for plan in plans for new in plan.new_rows]
    assert 1 < len(described) <= 1 + core.stats().jumps
    for new in described:
        assert new.token_ids is not None
        known = new.token_ids[2:].tolist()
        assert known == got.tokens[0][: len(known)], "the worker gets the tokens so far"


# ---------------------------------------------------------------- random schemas and schedules


@given(data=st.data())
def test_jumps_change_no_token(data: st.DataObject) -> None:
    """Random schemas, styles, prompts and lengths, under preemption, chunking and prefix hits."""
    style = JsonStyle(data.draw(st.sampled_from(["spaced", "compact", "flexible"])))
    lookahead, block_size = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([2, 4, 8]))
    core = make_core(
        lookahead,
        block_size=block_size,
        num_blocks=data.draw(st.integers(128 // block_size + 2, 200 // block_size)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        budget=data.draw(st.integers(4, 40)),
        max_model_len=128,
        caching=data.draw(st.booleans()),
        host=data.draw(st.sampled_from([(0, 0), (20, 0)])),
    )
    wanted: dict[int, list[int]] = {}
    valid: dict[int, dict[str, Any]] = {}
    for key in range(data.draw(st.integers(2, 7))):
        schema = data.draw(schemas)
        grammar = build_grammar(StructuredOutputsParams(json=schema), style).text
        prompt = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=28))
        most = data.draw(st.integers(1, 100))
        wanted[key] = masked_text(prompt, grammar, most)
        valid[key] = schema
        core.add(
            request(
                key,
                prompt,
                most,
                grammar,
                jumps=data.draw(st.sampled_from([True, True, False])),
                stream=data.draw(st.booleans()),
            )
        )
    got = run(core)
    check_blocks(core)
    for key, tokens in wanted.items():
        assert got.tokens[key] == tokens
        if got.reasons[key] == FinishReason.STOP:
            text = decode([token for token in tokens if token != token_id(EOS)])
            if "\ufffd" not in text:
                jsonschema.validate(json.loads(text), valid[key])
    stats = core.stats()
    event(f"jumps: {stats.jumps > 0}, preemptions: {stats.preemptions > 0}")


def test_the_vocabulary_is_what_the_tests_think() -> None:
    for text in (EOS, THINK_END, CALL):
        assert small_tokenizer().encode(text).ids == [token_id(text)]
