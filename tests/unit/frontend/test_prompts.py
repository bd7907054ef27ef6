"""Prompts: rendering, tokenizing, truncating and limits, as LLM and the server share them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests.input import InputProcessor
from kvasir.frontend.requests.prompts import PromptProcessor, TokenizedPrompt, off_loop
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.sampling_params import SamplingParams

USER = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}{{ mood }}"


def make_config(max_model_len: int = 32) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model="m", max_model_len=max_model_len, vocab_size=400))


@pytest.fixture
def prompts(sentencepiece: Tokenizer) -> PromptProcessor:
    return InputProcessor(make_config(max_model_len=8), sentencepiece).prompts


@pytest.mark.parametrize(("truncate", "kept"), [(None, 5), (3, 3), (-1, 5), (7, 5)])
def test_truncation_keeps_the_last_tokens(prompts: PromptProcessor, truncate: int | None, kept: int) -> None:
    ids = [1, 2, 3, 4, 5]
    read = prompts.read(ids, truncate)
    assert read.token_ids == ids[-kept:] and read.array.tolist() == read.token_ids


@pytest.mark.parametrize("truncate", [0, -2, 8])
def test_wrong_truncation(prompts: PromptProcessor, truncate: int) -> None:
    with pytest.raises(RequestError) as caught:
        prompts.read([1, 2], truncate)
    assert caught.value.parameter == "truncate_prompt_tokens"


def test_a_prompt_that_leaves_no_room(prompts: PromptProcessor) -> None:
    assert len(prompts.read([1] * 7).token_ids) == 7
    with pytest.raises(PromptTooLongError, match="8 tokens, but max_model_len=8 leaves room for 7") as caught:
        prompts.read([1] * 8)
    assert caught.value.num_tokens == 8
    assert len(prompts.read([1] * 8, truncate=-1).token_ids) == 7


def test_a_text_that_cannot_fit_is_not_tokenized(prompts: PromptProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "h" * 20_000
    (cut,) = prompts.read_all([text], truncate=2)
    assert len(cut.token_ids) == 2, "what is truncated may be of any length"
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *arguments: pytest.fail("it was tokenized"))
    with pytest.raises(PromptTooLongError, match="20000 characters") as caught:
        prompts.read_all([text])
    assert caught.value.num_tokens is None


def test_a_tokenized_prompt_is_not_checked_again(prompts: PromptProcessor, sentencepiece: Tokenizer) -> None:
    (read,) = prompts.read_all([{"prompt": "he", "cache_salt": "s"}])
    assert isinstance(read, TokenizedPrompt) and (read.text, read.salt) == ("he", b"s")
    assert prompts.read(read) is read
    request, state = InputProcessor(make_config(), sentencepiece).process("r", read, SamplingParams(), 0, 0.0)
    assert request.prompt_token_ids is read.array and state.prompt_token_ids is read.token_ids
    assert (request.cache_salt, state.prompt) == (b"s", "he")


def test_arguments_that_a_template_does_not_read(prompts: PromptProcessor) -> None:
    assert prompts.render(USER, chat_template=TEMPLATE, mood="glad") == "hello!glad"
    assert prompts.render(USER, chat_template=TEMPLATE, chat_template_kwargs={"other": 1}) == "hello!"
    for name, value in (("documents", [{"text": "x"}]), ("tools", [{"type": "function"}]), ("effort", "low")):
        with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
            prompts.render(USER, chat_template=TEMPLATE, **{name: value})  # type: ignore[arg-type]
        assert caught.value.parameter == name
    assert prompts.render(USER, chat_template=TEMPLATE, tools=[{"type": "function"}], may_ignore=("tools",)) == "hello!"
    with pytest.raises(RequestError, match="tools cannot be a variable"):
        prompts.render(USER, chat_template=TEMPLATE, chat_template_kwargs={"tools": []})


def test_long_texts_leave_the_event_loop() -> None:
    short, long = (asyncio.run(off_loop(size, threading.get_ident)) for size in (10, 1 << 20))
    assert short == threading.get_ident() and long != short
