from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.frontend.text.detokenizer import Detokenizer, decode_finished, make_detokenizer
from kvasir.frontend.text.tokenizer import Tokenizer
from tests.unit.frontend.conftest import RealTokenizers

TEXTS = ["Hello world", "日本語 👩‍👩‍👧‍👦 é", "  spaces \n\n\t tabs", "🤖" * 10, "नमस्ते 한국어", "x\ufffdy\ufffd"]


def _stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(data=st.data())
def test_streamed_text_equals_whole_text_for_any_tokens(real: RealTokenizers, name: str, data: st.DataObject) -> None:
    tokenizer = real.ours(name)
    special = st.sampled_from(tokenizer.all_special_ids)
    token = st.one_of(st.integers(0, 300), st.integers(0, len(tokenizer) + 5), special)
    ids, prompt = data.draw(st.lists(token, max_size=40)), data.draw(st.lists(token, min_size=1, max_size=5))
    for skip in (True, False):
        pieces = _stream(make_detokenizer(tokenizer, prompt, skip), ids)
        assert "".join(pieces) == decode_finished(tokenizer, [(prompt, ids)], skip)[0] == tokenizer.decode(ids, skip)


@given(data=st.data())
def test_streamed_text_equals_whole_text_with_context(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    token = st.one_of(st.integers(0, len(sentencepiece) + 2), st.integers(259, len(sentencepiece) - 1))
    ids, prompt = data.draw(st.lists(token, max_size=60)), data.draw(st.lists(token, min_size=1, max_size=20))
    for skip in (True, False):
        pieces = _stream(make_detokenizer(sentencepiece, prompt, skip), ids)
        assert "".join(pieces) == decode_finished(sentencepiece, [(prompt, ids)], skip)[0]


@given(before=st.text(alphabet="helo wrd.é世🤖", min_size=1), after=st.text(alphabet="helo wrd.é世🤖"))
def test_prompt_and_output_read_on(sentencepiece: Tokenizer, before: str, after: str) -> None:
    """The output's text is what stands behind the prompt, its first space included."""
    ids = sentencepiece.encode(before + after)
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        shown = sentencepiece.decode(prompt)
        if shown and "\ufffd" not in shown:
            expected = (before + after)[len(shown) :]
            assert decode_finished(sentencepiece, [(prompt, output)], True) == [expected]
            assert "".join(_stream(make_detokenizer(sentencepiece, prompt, True), output)) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(real: RealTokenizers, sentencepiece: Tokenizer, name: str, text: str) -> None:
    for tokenizer in (real.ours(name), sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = _stream(make_detokenizer(tokenizer, ids[:0], True), ids)
        assert "".join(pieces) == text
        assert sum("\ufffd" in piece for piece in pieces) <= text.count("\ufffd")


def test_an_end_in_the_middle_of_a_character_shows(real: RealTokenizers, sentencepiece: Tokenizer) -> None:
    for tokenizer in (real.ours("gpt2"), sentencepiece):
        ids = tokenizer.encode("lo🤖", add_special_tokens=False)[:-1]
        *pieces, last = _stream(make_detokenizer(tokenizer, [], True), ids)
        assert "".join(pieces) == "lo"
        assert last and set(last) == {"\ufffd"}
        assert decode_finished(tokenizer, [([], ids)], True) == ["lo" + last]


def test_special_tokens_are_skipped_or_shown(real: RealTokenizers) -> None:
    llama = real.ours("llama3_1")
    ids = [*llama.encode("Hi", add_special_tokens=False), 128009, 128000]
    assert _stream(make_detokenizer(llama, [1], True), ids) == ["Hi", "", "", ""]
    assert _stream(make_detokenizer(llama, [1], False), ids) == ["Hi", "<|eot_id|>", "<|begin_of_text|>", ""]


def test_skipped_tokens_do_not_crowd_out_the_context(sentencepiece: Tokenizer) -> None:
    word = sentencepiece.convert_tokens_to_ids("▁wo")
    assert word is not None
    ids = [word, *[2] * 50, word]
    assert "".join(_stream(make_detokenizer(sentencepiece, [word], True), ids)) == " wo wo"
    assert decode_finished(sentencepiece, [([word], ids)], True) == [" wo wo"]


@pytest.mark.parametrize("token", [3 + 0xE4, 2, 1000, 260])
def test_work_is_linear(sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Bytes that never make a character, or tokens without text, must not pile up."""
    decode, decoded = sentencepiece.decode, []

    def spy(ids: list[int], skip_special_tokens: bool = False) -> str:
        decoded.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(sentencepiece, "decode", spy)
    _stream(make_detokenizer(sentencepiece, [], True), [token] * 1000)
    assert sum(decoded) < 64 * 1000


def test_whole_takes_many_at_once(real: RealTokenizers, sentencepiece: Tokenizer) -> None:
    for tokenizer in (real.ours("qwen2_5"), sentencepiece):
        batch = [([5], tokenizer.encode(text, add_special_tokens=False)) for text in ("he", "", "lo wo", "🤖")]
        alone = [decode_finished(tokenizer, [request], True)[0] for request in batch]
        assert decode_finished(tokenizer, batch, True) == alone
