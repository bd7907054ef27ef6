from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.engine import EngineConfig, ModelConfig, ParallelConfig
from kvasir.errors import ConfigError, ModelError, RequestError
from kvasir.frontend.requests.input import InputProcessor, default_sampling_params
from kvasir.frontend.requests.output import RequestState
from kvasir.frontend.requests.prompts import PromptType
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.messages import EngineRequest
from kvasir.sampling_params import RequestOutputKind, SamplingParams


def make_config(**model: Any) -> EngineConfig:
    settled = {"max_model_len": 32, "vocab_size": 400, "seed": 0, "max_logprobs": 5, "generation": {}, "hf": {}}
    return EngineConfig(model=ModelConfig(model="m", **settled | model))


def ask(
    prompt: PromptType | Any,
    params: SamplingParams | None = None,
    *,
    key: int = 7,
    tokenizer: Tokenizer | None = None,
    **model: Any,
) -> tuple[EngineRequest, RequestState]:
    processor = InputProcessor(make_config(**model), tokenizer)
    return processor.process("request", prompt, params or SamplingParams(), key, 1.5)


# ---------------------------------------------------------------- prompts


def test_every_kind_of_prompt(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello")
    for prompt, text in [
        ("hello", "hello"),
        ({"prompt": "hello"}, "hello"),
        (ids, None),
        (tuple(ids), None),
        (np.array(ids), None),
        ({"prompt_token_ids": ids}, None),
        ({"prompt_token_ids": ids, "prompt": "hallo"}, "hallo"),
    ]:
        request, state = ask(prompt, tokenizer=sentencepiece)
        assert request.prompt_token_ids.dtype == np.int32
        assert request.prompt_token_ids.tolist() == state.prompt_token_ids == ids
        assert state.prompt == text
        assert (request.key, state.key, state.request_id, state.metrics.arrival_time) == (7, 7, "request", 1.5)
        assert request.cache_salt == b""


def test_cache_salt() -> None:
    assert ask({"prompt_token_ids": [1], "cache_salt": "é"})[0].cache_salt == "é".encode()


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([1, 400], "400 is not in the model's vocabulary, which goes from 0 to 399"),
        ([-1], "-1 is not in"),
        ([2**80], "is not in"),
        ([1.0], "a float among"),
        ([True, 5], "a bool among"),
        (["a"], "a str among"),
        ([None], "a NoneType among"),
        ([[1]], "a list among"),
        (b"ab", "list of integers"),
        (5, "list of integers"),
        (None, "list of integers"),
        ({"prompt_token_ids": "12"}, "list of integers"),
        ({}, "must have prompt"),
        ({"prompt": None}, "must have prompt"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "text must be a string"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt must be"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, "cache_salt must be"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "not multi_modal_data"),
        ("text", "skip_tokenizer_init"),
        (np.array([0.5]), "a float among"),
        (np.array([[1, 2]]), "a list among"),
    ],
)
def test_wrong_prompts_are_refused(prompt: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        ask(prompt)


def test_wrong_texts_are_refused(sentencepiece: Tokenizer) -> None:
    for text in ("", "\ud800"):
        with pytest.raises(RequestError):
            ask(text, tokenizer=sentencepiece)


def test_numpy_integers_become_plain() -> None:
    state = ask([np.int64(3), np.int32(4)])[1]
    assert [type(token) for token in state.prompt_token_ids] == [int, int]


def test_prompt_list_is_copied() -> None:
    ids = [1, 2, 3]
    state = ask(ids)[1]
    ids.append(4)
    assert state.prompt_token_ids == [1, 2, 3]


def test_tokenize_many_at_once(sentencepiece: Tokenizer) -> None:
    processor = InputProcessor(make_config(), sentencepiece)
    prompts: list[PromptType] = [
        "he",
        [1, 2],
        {"prompt": "lo", "cache_salt": "s"},
        {"prompt_token_ids": [5], "prompt": "x"},
    ]
    ready = processor.prompts.tokenize(prompts)
    assert ready[1] == [1, 2] and ready[3] is prompts[3]
    for prompt, done in zip(prompts, ready, strict=True):
        one, two = (processor.process("a", p, SamplingParams(), 0, 0.0) for p in (prompt, done))
        assert one[0].prompt_token_ids.tolist() == two[0].prompt_token_ids.tolist()
        assert (one[0].cache_salt, one[1].prompt) == (two[0].cache_salt, two[1].prompt)
    assert InputProcessor(make_config(), None).prompts.tokenize(prompts) == prompts


# ---------------------------------------------------------------- lengths


def test_lengths_fit_the_model() -> None:
    assert ask([1] * 10, SamplingParams(max_tokens=5))[0].max_tokens == 5
    assert ask([1] * 10, SamplingParams(max_tokens=22))[0].max_tokens == 22
    assert ask([1] * 10, SamplingParams(max_tokens=1000))[0].max_tokens == 22
    assert ask([1] * 10, SamplingParams(max_tokens=None))[0].max_tokens == 22
    assert ask([1] * 31, SamplingParams(max_tokens=None))[0].max_tokens == 1
    for length in (32, 33, 1000):
        with pytest.raises(RequestError, match=f"maximum context length is 32 tokens. .* in {length} tokens") as caught:
            ask([1] * length)
        assert caught.value.parameter == "prompt"


def test_min_tokens_bans_stop_tokens_at_the_first_positions() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=[9])
    sampling = ask([1] * 10, params, generation={"eos_token_id": 3})[0].sampling
    assert (sampling.banned_until, sampling.stop_token_ids) == (14, (9, 3))
    assert ask([1] * 10)[0].sampling.banned_until == 0
    with pytest.raises(RequestError, match="min_tokens=4 cannot be reached.* room for 2 tokens"):
        ask([1] * 30, params)
    with pytest.raises(RequestError, match="forbids every token"):
        ask([1], SamplingParams(min_tokens=1, stop_token_ids=list(range(400))))


# ---------------------------------------------------------------- stopping


def test_end_tokens_come_from_model_and_tokenizer(sentencepiece: Tokenizer) -> None:
    for generation, hf, expected in [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 8}, (2, 5, 6)),
        ({"eos_token_id": 5}, {}, (2, 5)),
        ({}, {"eos_token_id": 8}, (2, 8)),
        ({}, {}, (2,)),
        ({"eos_token_id": None}, {}, (2,)),
        ({"eos_token_id": [5, 4000]}, {}, (2, 5)),  # beyond the vocabulary: can never be sampled
    ]:
        request, state = ask([1], tokenizer=sentencepiece, generation=generation, hf=hf)
        assert request.sampling.stop_token_ids == expected
        assert state.eos_token_ids == set(expected)
    request, state = ask([1], SamplingParams(ignore_eos=True, stop_token_ids=[2, 9, 9]), tokenizer=sentencepiece)
    assert request.sampling.stop_token_ids == (2, 9)
    assert state.eos_token_ids == frozenset()
    with pytest.raises(ModelError, match="eos_token_id"):
        ask([1], generation={"eos_token_id": "x"})


def test_wrong_defaults_are_refused_at_the_start() -> None:
    wrong = {"temperature": -4}
    with pytest.raises(ConfigError, match="^override_generation_config has a wrong value: temperature must be"):
        ask([1], generation=wrong, override_generation_config=wrong)
    ask([1], generation=wrong, override_generation_config={"top_k": 5})  # the model's own, and the request has others


def test_stops_are_checked_against_the_model(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop_token_ids has 400, but the model's vocabulary ends at 399"):
        ask([1], SamplingParams(stop_token_ids=[400]))
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        ask([1], SamplingParams(stop="END"))
    state = ask([1], SamplingParams(stop="END"), tokenizer=sentencepiece)[1]
    assert state.stops is not None


# ---------------------------------------------------------------- sampling


def test_sampling_settings_reach_the_row() -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=11, logprobs=3)
    row = ask([1, 2], params)[0].sampling
    assert (row.temperature, row.top_k, row.top_p, row.min_p, row.seed, row.logprobs) == (0.7, 40, 0.9, 0.05, 11, 3)


@pytest.mark.parametrize(("asked", "given"), [(-1, 0), (0, 0), (1, 1), (399, 399), (400, 0), (10**6, 0)])
def test_top_k_is_off_where_it_keeps_all(asked: int, given: int) -> None:
    assert ask([1], SamplingParams(top_k=asked))[0].sampling.top_k == given


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_no_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.5, min_p=0.1, seed=3, logprobs=2, min_tokens=2)
    row = ask([1], params)[0].sampling
    assert (row.temperature, row.top_k, row.top_p, row.min_p, row.seed) == (0.0, 0, 1.0, 0.0, 0)
    assert (row.logprobs, row.banned_until) == (2, 3)


def test_logprobs_have_a_limit() -> None:
    assert ask([1], SamplingParams(logprobs=5))[0].sampling.logprobs == 5
    with pytest.raises(RequestError, match="logprobs=6 is more than the engine's max_logprobs=5"):
        ask([1], SamplingParams(logprobs=6))


@given(seed=st.integers(-(2**63), 2**64 - 1).filter(lambda seed: seed != -1))
def test_own_seeds_do_not_depend_on_engine_or_order(seed: int) -> None:
    seeds = {ask([1], SamplingParams(seed=seed), key=key, seed=key)[0].sampling.seed for key in (0, 1, 5)}
    assert len(seeds) == 1
    [folded] = seeds
    assert 0 <= folded < 2**32
    if 0 <= seed < 2**32:
        assert folded == seed


def test_all_bits_of_a_seed_count() -> None:
    seeds = [0, 1, 2**32, 2**40, 2**63, -2, -(2**40)]
    assert len({ask([1], SamplingParams(seed=seed))[0].sampling.seed for seed in seeds}) == len(seeds)


def test_seeds_made_for_requests_differ_and_repeat() -> None:
    processors = [InputProcessor(make_config(seed=seed), None) for seed in (0, 0, 1)]
    first, again, other = (
        [p.process("a", [1], SamplingParams(), key, 0.0)[0].sampling.seed for key in range(3000)] for p in processors
    )
    assert first == again
    assert len(set(first)) == 3000
    assert not set(first) & set(other[:10])
    assert all(0 <= seed < 2**32 for seed in first)
    assert abs(np.mean(first) / 2**31 - 1) < 0.1  # spread over all 32 bits
    assert ask([1], SamplingParams(seed=-1), key=5)[0].sampling.seed == first[5]


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize(
    ("options", "stream"),
    [
        ({}, True),
        ({"output_kind": RequestOutputKind.DELTA}, True),
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, False),
        ({"output_kind": RequestOutputKind.FINAL_ONLY, "stop": "x"}, True),
        ({"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0}, True),
    ],
)
def test_tokens_are_sent_as_they_come_only_if_needed(
    sentencepiece: Tokenizer, options: dict[str, Any], stream: bool
) -> None:
    assert ask([1], SamplingParams(**options), tokenizer=sentencepiece)[0].stream is stream


def test_parameters_are_verified_again_and_may_change_later(sentencepiece: Tokenizer) -> None:
    params = SamplingParams()
    params.top_p = 2.0
    with pytest.raises(RequestError, match="top_p"):
        ask([1], params)
    params.top_p, params.stop = 1.0, "END"
    state = ask([1], params, tokenizer=sentencepiece)[1]
    params.min_tokens, params.output_kind = 5, RequestOutputKind.FINAL_ONLY
    assert (state.min_tokens, state.kind) == (0, RequestOutputKind.CUMULATIVE)
    with pytest.raises(RequestError, match="must be SamplingParams, not dict"):
        ask([1], {"temperature": 1})  # type: ignore[arg-type]


# ---------------------------------------------------------------- defaults


def test_default_sampling_params_come_from_the_generation_config(log_lines: list[str]) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "max_new_tokens": 50}
    generation |= {"do_sample": True, "eos_token_id": 3, "repetition_penalty": 1.05, "bos_token_id": None}
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_tokens=50, repetition_penalty=1.05)
    assert default_sampling_params(make_config(generation=generation)) == expected
    assert default_sampling_params(make_config()) == SamplingParams()
    assert log_lines == []


def test_wrong_defaults_are_the_models_fault() -> None:
    config = make_config(generation={"top_p": 7})
    with pytest.raises(ModelError, match="generation config.*top_p"):
        default_sampling_params(config)


@pytest.mark.parametrize("extra", ["foo", "cache_slat", "multi_modal_data"])
def test_texts_tokenized_at_once_keep_what_must_be_refused(extra: str, sentencepiece: Tokenizer) -> None:
    processor = InputProcessor(make_config(), sentencepiece)
    good, bad = processor.prompts.tokenize(["hello", {"prompt": "hello", extra: 1}])  # type: ignore[list-item]
    assert isinstance(good, dict) and good["prompt_token_ids"] == sentencepiece.encode("hello")
    with pytest.raises(RequestError, match=extra):
        processor.process("request", bad, SamplingParams(), 7, 1.5)


def test_logits_processors_need_a_single_process() -> None:
    config = replace(make_config(), parallel=ParallelConfig(tensor_parallel_size=2))
    processor = InputProcessor(config, None)
    with pytest.raises(RequestError, match="tensor_parallel_size=2") as error:
        processor.process("request", [1], SamplingParams(logits_processors=[lambda said, logits: logits]), 7, 1.5)
    assert error.value.parameter == "logits_processors"
