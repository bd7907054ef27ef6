"""What a request asks of sampling beyond the usual, and what ends it here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.engine import ModelConfig
from kvasir.errors import ConfigError, RequestError
from kvasir.frontend.requests.extras import ExtrasBuilder
from kvasir.frontend.text.detokenizer import decode_finished, make_detokenizer
from kvasir.frontend.text.stop import Repetitions
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.outputs import FlatLogprobs, Logprob
from kvasir.sampling_params import RepetitionDetectionParams, SamplingParams


def builder(tokenizer: Tokenizer | None = None, **settings: Any) -> ExtrasBuilder:
    return ExtrasBuilder(ModelConfig(model="m", vocab_size=400, **settings), tokenizer)


def test_plain_requests_have_no_extras() -> None:
    assert builder().build(SamplingParams(temperature=0.7, top_p=0.9, stop="x"), 3, 5) is None
    extras = builder().build(SamplingParams(top_ema_p=0.5, top_ema_d=2), 3, 5)
    assert extras is not None and extras.ema_key == 3


def test_bad_words_at_the_beginning_and_after_a_space(sentencepiece: Tokenizer) -> None:
    extras = builder(sentencepiece).build(SamplingParams(bad_words=["lo", " wo"]), 0, 1)
    assert extras is not None
    alone = tuple(sentencepiece.encode("lo", add_special_tokens=False))
    assert alone in extras.bad_words
    for word in extras.bad_words:
        assert sentencepiece.decode(list(word)).strip() in ("lo", "wo")


def test_bad_words_may_not_forbid_all_that_is_allowed(sentencepiece: Tokenizer) -> None:
    (only,) = words = sentencepiece.encode("h", add_special_tokens=False)[-1:]
    word = sentencepiece.decode(words)
    params = SamplingParams(allowed_token_ids=[only], bad_words=[word])
    extras = builder(sentencepiece).build(params, 0, 1)
    assert extras is not None and (only,) in extras.bad_words
    with pytest.raises(RequestError, match="allows only tokens that min_tokens, bad_words or"):
        builder(sentencepiece).check_possible(params, ())
    builder(sentencepiece).check_possible(SamplingParams(allowed_token_ids=[only, 5], bad_words=[word]), ())


@pytest.mark.parametrize("field", ["allowed_token_ids", "forbidden_token_ids", "logprob_token_ids"])
def test_tokens_must_be_in_the_vocabulary(field: str) -> None:
    with pytest.raises(RequestError, match="ends at 399") as error:
        builder().build(SamplingParams(**{field: [3, 400]}), 0, 1)
    assert error.value.parameter == field


def test_start_up_processors_that_cannot_be_loaded() -> None:
    for entry in ("json:nothing", "nowhere:thing", "json", "operator:itemgetter", 5):
        with pytest.raises(ConfigError, match="logits_processors"):
            builder(logits_processors=[entry])
    extras = builder(logits_processors=["operator:neg"])
    assert len(extras.startup.plugins) == 1


def test_processors_of_two_and_three_arguments() -> None:
    calls: list[Any] = []
    two, three = (lambda said, x: calls.append((said, x))), (lambda prompt, said, x: calls.append((prompt, said, x)))
    extras = builder().build(SamplingParams(logits_processors=[two, three]), 0, 1)
    assert extras is not None
    for process in extras.processors:
        process([1], [2], 3)
    assert calls == [([2], 3), ([1], [2], 3)]


# ---------------------------------------------------------------- repetitions


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        if len(tokens) >= size * params.min_count:
            tail = tokens[-size * params.min_count :]
            if tail == tail[:size] * params.min_count:
                return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(2, 4),
)
def test_repetitions_are_found_when_they_are_there(tokens: list[int], low: int, more: int, count: int) -> None:
    params = RepetitionDetectionParams(low + more, low, count)
    detector = Repetitions(params)
    for i, token in enumerate(tokens):
        assert detector.feed(token) == repeats(tokens[: i + 1], params), f"after {tokens[: i + 1]}"


# ---------------------------------------------------------------- text and logprobs


def test_spaces_between_special_tokens(sentencepiece: Tokenizer) -> None:
    """Added tokens in a row stand without a space; the text is the same in steps and as a whole."""
    added = sentencepiece.added_tokens(skip_special_tokens=False)
    ids = [*list(added)[:2], *sentencepiece.encode("lo", add_special_tokens=False), *list(added)[:2]]
    steps = make_detokenizer(sentencepiece, [], False, spaces_between=False)
    text = "".join([*map(steps.push, ids), steps.flush()])
    assert [text] == decode_finished(sentencepiece, [([], ids)], False, spaces_between=False)
    first, second = list(added.values())[:2]
    assert text.count(first + second) == 2


def test_flat_logprobs_read_like_a_list() -> None:
    flat = FlatLogprobs()
    flat.append(None)
    flat.append([(5, -0.5, 1, "a"), (7, -1.5, None, None)])
    assert list(flat) == [None, {5: Logprob(-0.5, 1, "a"), 7: Logprob(-1.5, None, None)}]
    assert list(flat[1:]) == [flat[1]] and flat[-1] == flat[1] and len(flat) == 2
    with pytest.raises(IndexError):
        flat[2]
