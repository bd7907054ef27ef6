"""Prompts: rendering, tokenizing, truncating and limits, as LLM and the server share them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers

from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.errors import PromptTooLongError, RequestError
from kvasir.frontend.requests.input import InputProcessor
from kvasir.frontend.requests.prompts import PromptProcessor, TextPool, TokenizedPrompt
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.sampling_params import SamplingParams
from tests.unit.frontend.conftest import RealTokenizers

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
    with pytest.raises(
        PromptTooLongError, match="maximum context length is 8 tokens. However, .* in 8 tokens"
    ) as caught:
        prompts.read([1] * 8)
    assert caught.value.num_tokens == 8
    assert len(prompts.read([1] * 8, truncate=-1).token_ids) == 7


def test_a_text_that_cannot_fit_is_not_tokenized(prompts: PromptProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "h" * 20_000
    (cut,) = prompts.read_all([text], truncate=2)
    assert len(cut.token_ids) == 2, "what is truncated may be of any length"
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *arguments: pytest.fail("it was tokenized"))
    with pytest.raises(PromptTooLongError, match=r"more than 7 tokens \(20000 characters\)") as caught:
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


def test_deep_values_are_the_requests_fault(prompts: PromptProcessor) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    call = {"function": {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}}
    template = TEMPLATE + "{{ messages[0].tool_calls }}{{ messages[0].x }}"
    for messages, extra in (
        (USER, {"mood": deep}),
        ([{**USER[0], "tool_calls": [call]}], {}),
        ([{**USER[0], "x": deep}], {}),
    ):
        with pytest.raises(RequestError, match="nested too deeply|not JSON"):
            prompts.render(messages, chat_template=template, chat_template_kwargs=extra)


def test_long_texts_leave_the_event_loop() -> None:
    async def ask(size: int) -> int:
        return await TextPool(32).run(size, threading.get_ident)

    short, long = (asyncio.run(ask(size)) for size in (10, 1 << 20))
    assert short == threading.get_ident() and long != short


def test_long_texts_wait_until_there_is_room() -> None:
    pool, gate, running = TextPool(32, 50_000), threading.Event(), []

    def work() -> int:
        running.append(1)
        gate.wait(60)
        return len(running)

    async def ask() -> None:
        tasks = [asyncio.create_task(pool.run(20_000, work)) for _ in range(5)]
        huge = asyncio.create_task(pool.run(10**9, work))  # is alone, but runs
        while len(running) < min(2, pool._threads._max_workers):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(running) <= 2 and pool.num_characters == 40_000
        tasks[0].cancel()  # it runs: its characters count until its thread is done
        tasks[3].cancel()  # it waits
        await asyncio.sleep(0.05)
        assert pool.num_characters == 40_000
        gate.set()
        done = await asyncio.gather(*tasks, huge, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in done] == [True, False, False, True, False, False]
        while pool.num_characters:
            await asyncio.sleep(0.01)
        assert len(running) == 5

    asyncio.run(ask())


TEXTS = {
    "words": "The quick brown fox, 17 of them; jumps\nover it's lazy dogs.  And  so on\n\nfor ever: x=3.14159 " * 2000,
    "lines": "".join(f"line {i}\n" for i in range(20_000)),
    "no words": "1" * 100_000,
    "other scripts": "Съешь ещё этих мягких булок. 敏捷的棕色狐狸跳过了懒狗。 e\u0301 ok " * 3000,
}


def check_cuts(tokenizer: Tokenizer) -> None:
    prompts = PromptProcessor(replace(make_config(max_model_len=300).model, vocab_size=1 << 20), tokenizer)
    for kind, text in TEXTS.items():
        for special in (True, False):
            whole = tokenizer.encode(text, special)
            for truncate in (1, 7, 299, -1):
                (read,) = prompts.read_all([text], special, truncate)
                assert read.token_ids == whole[-(299 if truncate == -1 else truncate) :], (kind, special, truncate)
                assert read.text == text
    if tokenizer.characters_per_token is not None and tokenizer.splits_at_words:
        assert len(prompts.cut(TEXTS["words"], 7)) < len(TEXTS["words"]) / 2, "most of it is not tokenized"


def test_truncation_of_a_cut_text_is_that_of_the_whole(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.characters_per_token is not None and sentencepiece.splits_at_words
    check_cuts(sentencepiece)


@pytest.mark.slow
def test_truncation_by_real_tokenizers(real: RealTokenizers, name: str) -> None:
    tokenizer = real.ours(name)
    assert tokenizer.characters_per_token is not None
    check_cuts(tokenizer)


def test_tokenizers_that_may_drop_characters_set_no_limit(sentencepiece: Tokenizer) -> None:
    for normalizer in (normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" +"), " "), normalizers.NFKC()):
        backend = tokenizers.Tokenizer.from_str(sentencepiece._backend.to_str())
        backend.normalizer = normalizer
        assert Tokenizer(backend, {}).characters_per_token is None
    backend = tokenizers.Tokenizer.from_str(sentencepiece._backend.to_str())
    backend.normalizer = normalizers.Replace(tokenizers.Regex("h+"), "h")
    prompts = PromptProcessor(make_config(max_model_len=8).model, Tokenizer(backend, {}))
    assert len(prompts.read("h" * 50_000).token_ids) == 1, "a long text that fits is taken"


def test_many_texts_are_tokenized_in_small_batches(
    sentencepiece: Tokenizer, prompts: PromptProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    plain = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: list[str], special: bool = True) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return plain(self, texts, special)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    texts = ["h" * (100 + i) for i in range(4000)]
    read = prompts.read_all(texts, truncate=3)
    assert [len(each.token_ids) for each in read] == [3] * 4000
    assert len(sizes) > 1 and max(sizes) <= 1 << 18
