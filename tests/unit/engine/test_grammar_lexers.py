"""Matchers that requests with equal grammars do not share."""

from __future__ import annotations

import gc
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from llguidance import LLMatcher

from kvasir.engine import grammar_guide, grammar_lexers
from kvasir.engine.grammar_compile import compile_again
from kvasir.engine.grammar_guide import GrammarGuide, guide_argument
from kvasir.engine.grammar_lexers import GrammarLexers
from kvasir.frontend.text.grammar import build_grammar
from kvasir.sampling_params import StructuredOutputsParams
from tests.grammars import masked_text, small_guides, small_vocabulary

GRAMMAR = build_grammar(StructuredOutputsParams(regex="[a-c]{2}(xyz)?[0-9]{30}")).text


class Later(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
        self.given.append(work)
        return Future()

    def run(self) -> None:
        while self.given:
            self.given.pop()()


def compiled() -> LLMatcher:
    return compile_again(small_vocabulary(), GRAMMAR)


def lexers() -> tuple[GrammarLexers, Later]:
    threads = Later()
    return GrammarLexers(compiled(), compiled, threads), threads


def test_each_of_many_requests_gets_a_lexer_of_its_own_and_the_next_ones_use_them_again() -> None:
    found, threads = lexers()
    taken = [found.take() for _ in range(5)]
    assert len(set(taken)) == 1, "they share until there are more"
    for _ in range(4):  # how many may be compiled is known when one has been
        threads.run()
        taken = [found.exchange(each) if each.users > 1 else each for each in taken]
    threads.run()
    taken = [found.exchange(each) if each.users > 1 else each for each in taken]
    assert len(set(taken)) == len(found) == 5 and not threads.given and found.num_idle == 0
    for each in taken:
        found.give_back(each)
    assert {found.take() for _ in range(5)} == set(taken) and not threads.given


def test_a_grammar_that_compiles_slowly_has_few_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_lexers, "_SECONDS", 0.0)
    found, threads = lexers()
    taken = [found.take() for _ in range(6)]
    for _ in range(3):
        threads.run()
        taken = [found.exchange(each) if each.users > 1 else each for each in taken]
    assert len(found) == 2 and sorted(each.users for each in set(taken)) == [1, 5]
    assert found.take().users == 2, "the one with the fewest users"


def test_a_grammar_that_does_not_compile_again_is_shared() -> None:
    def fails() -> LLMatcher:
        raise RuntimeError("no memory")

    threads = Later()
    found = GrammarLexers(compiled(), fails, threads)
    taken = [found.take() for _ in range(3)]
    threads.run()
    assert [found.exchange(each) for each in taken] == taken and not threads.given


def test_spare_lexers_are_dropped_but_for_one() -> None:
    found, threads = lexers()
    first, second = found.take(), found.take()
    threads.run()
    second = found.exchange(second)
    found.give_back(second)
    assert found.num_spare == found.drop_spare() == 1
    assert len(found) == 1 and found.num_idle == 0, "the other is in use"
    found.give_back(first)
    assert found.num_spare == found.drop_spare() == 0
    assert len(found) == found.num_idle == 1


def test_grammars_that_were_used_longest_ago_lose_their_spare_lexers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_guide, "_MAX_SPARE", 2)
    guides, threads = small_guides(), Later()
    monkeypatch.setattr(guides, "_compilers", threads)
    texts = [build_grammar(StructuredOutputsParams(regex=f"[a-c]{{{n}}}")).text for n in range(2, 6)]
    for text in texts[:3]:
        made = [guides.make(guide_argument(text)) for _ in range(2)]
        threads.run()
        del made
    assert [guides.lexers(text).num_spare for text in texts[:3]] == [1, 1, 1]
    guides.make(guide_argument(texts[3]))
    assert [guides.lexers(text).num_spare for text in texts] == [0, 1, 1, 0]


def test_a_guide_that_moves_to_a_lexer_of_its_own_goes_on_where_it_was() -> None:
    found, threads = lexers()
    want = masked_text([3, 1], GRAMMAR, 60)
    first, second = GrammarGuide(found, None, {}), GrammarGuide(found, None, {})
    for at, token in enumerate(want):
        if at == 9:
            assert second._lexer is first._lexer
            threads.run()
        for guide in (first, second):
            guide.accept([token])
            assert guide.error is None
        if not first.is_complete:
            assert first.matcher.compute_bitmask() == second.matcher.compute_bitmask()
        if at == 9:
            assert second._lexer is not first._lexer
    assert first.is_complete and second.is_complete and found.num_idle == 2


def test_guides_give_their_lexers_back_however_they_end() -> None:
    guides = small_guides()
    made = [guides.make(guide_argument(GRAMMAR)) for _ in range(3)]
    del made
    gc.collect()
    assert guides.lexers(GRAMMAR)._num_taken == 0
