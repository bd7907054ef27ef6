"""Decoding options through the whole engine, against transformers and brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import SamplingParams
from kvasir.errors import ConfigError, RequestError
from kvasir.outputs import FlatLogprobs, RequestOutput
from kvasir.sampling_params import RequestOutputKind
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric, tokens
from tests.pairwise import few

VOCAB = 96


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("qwen3")


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields})


def decode(
    model: Model, prompt: list[int], count: int, change: Callable[[list[int], np.ndarray], np.ndarray]
) -> list[int]:
    """Greedy decoding over transformers' logits, changed in a plain loop."""
    said: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model.hf(torch.tensor([prompt + said]), use_cache=False).logits[0, -1].double().numpy()
        said.append(int(change(said, logits.copy()).argmax()))
    return said


# ---------------------------------------------------------------- what is sampled


def test_penalties_equal_a_loop_under_preemption(model: Model) -> None:
    params = greedy(presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3, max_tokens=24)

    def loop(prompt: list[int]) -> list[int]:
        def change(said: list[int], x: np.ndarray) -> np.ndarray:
            for token in set(prompt) | set(said):
                x[token] = x[token] / 1.3 if x[token] > 0 else x[token] * 1.3
            for token in said:
                x[token] -= 0.4
            for token in set(said):
                x[token] -= 0.6
            return x

        return decode(model, prompt, 24, change)

    with model.llm(**TIGHT, async_scheduling=True) as llm:
        got = tokens(generate(llm, model.prompts, params))
        assert metric(llm, "num_preemptions") > 0
    assert got == [loop(prompt) for prompt in model.prompts]


def test_bias_allowed_and_forbidden_tokens(model: Model) -> None:
    prompt = model.prompts[0]
    plain = model.greedy(prompt, 12)

    def without(said: list[int], x: np.ndarray) -> np.ndarray:
        x[plain[:2]] = -np.inf
        return x

    with model.llm() as llm:
        (biased,) = tokens(generate(llm, [prompt], greedy(logit_bias={17: 100})))
        assert biased == [17] * 12
        (allowed,) = tokens(generate(llm, [prompt], greedy(allowed_token_ids=[5, 6, 7])))
        assert set(allowed) <= {5, 6, 7}
        (forbidden,) = tokens(generate(llm, [prompt], greedy(forbidden_token_ids=plain[:2])))
        assert forbidden == decode(model, prompt, 12, without)
        with pytest.raises(RequestError, match="ends at 95"):
            generate(llm, [prompt], greedy(allowed_token_ids=[96]))
        with pytest.raises(RequestError, match="forbid"):
            generate(llm, [prompt], greedy(allowed_token_ids=[5], forbidden_token_ids=[5]))
        with pytest.raises(RequestError, match="tokenizer"):
            generate(llm, [prompt], greedy(bad_words=["no"]))


@pytest.mark.parametrize("settings", few([{"async_scheduling": True}, TIGHT], fast=[TIGHT]), ids=["ahead", "tight"])
def test_seeded_rows_with_every_stage_are_the_same_alone_and_in_a_batch(model: Model, settings: dict[str, Any]) -> None:
    wishes: list[dict[str, Any]] = [
        {"presence_penalty": 1.0},
        {"top_ema_p": 0.6, "top_ema_d": 2},
        {"logit_bias": {3: 4.0}, "repetition_penalty": 1.2},
        {"forbidden_token_ids": list(range(40))},
        {"top_ema_p": 0.4, "top_ema_d": 1, "frequency_penalty": 0.5, "top_k": 30},
        {},
        {"logits_processors": [lambda said, logits: logits.roll(len(said) % 5)]},
        {"allowed_token_ids": list(range(50, 80)), "min_p": 0.01},
    ]
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, **wishes[i % 8]) for i in range(16)]
    with model.llm(**settings) as llm:
        together = tokens(generate(llm, model.prompts, params))
    with model.llm(async_scheduling=False) as llm:
        alone = [tokens(generate(llm, [p], s))[0] for p, s in zip(model.prompts, params, strict=True)]
    assert together == alone


# ---------------------------------------------------------------- log-probabilities


def check_prompt_logprobs(model: Model, output: RequestOutput, count: int) -> None:
    found = output.prompt_logprobs
    assert found is not None and len(found) == len(output.prompt_token_ids) and found[0] is None
    wanted = model.logprobs(output.prompt_token_ids)
    for at in range(1, len(found)):
        entry, token = found[at], output.prompt_token_ids[at]
        assert entry is not None and next(iter(entry)) == token
        top = wanted[at - 1].topk(count).indices.tolist()
        assert set(entry) == {token, *top}
        for each, logprob in entry.items():
            assert math.isclose(logprob.logprob, wanted[at - 1, each], abs_tol=1e-4), f"position {at}"
        assert entry[token].rank == int((wanted[at - 1] > wanted[at - 1, token]).sum()) + 1


@pytest.mark.parametrize(
    "settings", few([{}, SMALL, TIGHT, {**SMALL, "async_scheduling": True}], fast=[{}, TIGHT]), ids=str
)
def test_prompt_logprobs_equal_transformers(model: Model, settings: dict[str, Any]) -> None:
    with model.llm(**settings) as llm:
        hits = [generate(llm, [model.prompts[0]], greedy())[0].num_cached_tokens for _ in range(2)]
        assert hits[1], "there is something to hit"
        outputs = generate(llm, model.prompts, greedy(prompt_logprobs=3, logprobs=0))
        if settings:
            assert metric(llm, "partial_prefills") > 0
        if settings == TIGHT:
            assert metric(llm, "num_preemptions") > 0
    assert [output.num_cached_tokens for output in outputs] == [0] * 16, "a prefix hit leaves positions without logits"
    for output in outputs:
        check_prompt_logprobs(model, output, 3)
    assert tokens(outputs) == [model.greedy(p, 12) for p in model.prompts]


def test_prompt_logprobs_come_with_the_first_delta_only(model: Model) -> None:
    with model.llm(**SMALL) as llm:
        params = greedy(prompt_logprobs=1, output_kind=RequestOutputKind.DELTA, max_tokens=4)
        llm.llm_engine.add_request("a", {"prompt_token_ids": model.prompts[0]}, params)
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
    check_prompt_logprobs(model, outputs[0], 1)
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * 3


def test_skipping_the_prefix_cache(model: Model) -> None:
    long = (model.prompts[0] * 3)[:100]
    with model.llm() as llm:
        generate(llm, [long], greedy())
        assert generate(llm, [long], greedy(skip_reading_prefix_cache=True))[0].num_cached_tokens == 0
        assert generate(llm, [long], greedy())[0].num_cached_tokens


def test_whole_vocabulary_named_and_flat_logprobs(model: Model) -> None:
    prompt = model.prompts[1]
    with model.llm(max_logprobs=-1) as llm:
        (all_of_them,) = generate(llm, [prompt], greedy(logprobs=-1, prompt_logprobs=-1, max_tokens=3))
        mix = [
            greedy(logprob_token_ids=[7, 50, 7]),
            greedy(logprobs=4),
            greedy(flat_logprobs=True, logprobs=2),
            greedy(),
        ]
        named, top, flat, plain = generate(llm, [prompt] * 4, mix)
    wanted = model.logprobs(prompt + top.outputs[0].token_ids)[len(prompt) - 1 :]
    assert all(len(entry) == VOCAB for entry in all_of_them.outputs[0].logprobs or [])
    check_prompt_logprobs(model, all_of_them, VOCAB)
    assert plain.outputs[0].logprobs is None
    for i, token in enumerate(top.outputs[0].token_ids):
        few, four = named.outputs[0].logprobs[i], top.outputs[0].logprobs[i]  # type: ignore[index]
        assert set(few) == {token, 7, 50} and set(four) == {token, *wanted[i].topk(4).indices.tolist()}  # type: ignore[arg-type]
        for each, value in few.items():  # type: ignore[union-attr]
            assert math.isclose(value.logprob, wanted[i, each], abs_tol=1e-4)
            assert value.rank == (1 if each == token else None)
    logprobs = flat.outputs[0].logprobs
    assert isinstance(logprobs, FlatLogprobs) and len(logprobs) == 12 and len(logprobs.token_ids) == 24
    assert [list(entry or ()) for entry in logprobs] == [list(e)[:2] for e in top.outputs[0].logprobs or []]  # type: ignore[arg-type]
    assert list(logprobs[2:5]) == [logprobs[2], logprobs[3], logprobs[4]]
    with model.llm() as llm, pytest.raises(RequestError, match="max_logprobs=20"):
        generate(llm, [prompt], greedy(logprobs=-1))


@pytest.mark.parametrize(
    "mode",
    few(
        ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        fast=["processed_logprobs", "raw_logits"],
    ),
)
def test_logprobs_modes(model: Model, mode: str) -> None:
    prompt = model.prompts[2]
    params = SamplingParams(temperature=0.5, seed=1, top_k=5, logit_bias={3: 9.0}, logprobs=8, max_tokens=6)
    with model.llm(logprobs_mode=mode) as llm:
        (output,) = generate(llm, [prompt], params)
    completion = output.outputs[0]
    for i, entry in enumerate(completion.logprobs or []):
        with torch.no_grad():
            text = torch.tensor([prompt + completion.token_ids[:i]])
            x = model.hf(text, use_cache=False).logits[0, -1].double().clone()
        if mode.startswith("processed"):
            x[3] += 9.0
            x = (x / 0.5).where(x >= x.topk(5).values[-1], -math.inf)
        wanted = x if mode.endswith("logits") else x.log_softmax(-1)
        for token, value in entry.items():  # type: ignore[union-attr]
            assert math.isclose(value.logprob, wanted[token], abs_tol=1e-3)


# ---------------------------------------------------------------- processors


def test_one_processor_leaves_the_other_rows_asynchronous(model: Model) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def shift(prompt: list[int], said: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, list(said)))
        logits[said[-1] if said else 0] = -math.inf
        return logits

    def change(said: list[int], x: np.ndarray) -> np.ndarray:
        x[said[-1] if said else 0] = -np.inf
        return x

    params = [greedy(max_tokens=30) for _ in range(8)]
    params[3] = greedy(max_tokens=15, logits_processors=[shift])
    with model.llm(async_scheduling=True) as llm:
        core = llm.llm_engine.client.core  # type: ignore[attr-defined]
        outputs = generate(llm, model.prompts[:8], params)
        steps = core.scheduler.stats.steps
    assert tokens(outputs)[3] == decode(model, model.prompts[3], 15, change)
    assert [p for p, _ in seen] == [model.prompts[3]] * 15
    assert [said for _, said in seen] == [tokens(outputs)[3][:i] for i in range(15)]
    assert [t for i, t in enumerate(tokens(outputs)) if i != 3] == [
        model.greedy(p, 30) for i, p in enumerate(model.prompts[:8]) if i != 3
    ]
    assert steps <= 33, "the others waited for the row that must wait"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda said, logits: 1 / 0, "ZeroDivisionError"),
        (lambda said, logits: None, "NoneType"),
        (lambda said, logits: logits * float("nan"), "no token is left"),
        (lambda said, logits: logits - float("inf"), "no token is left"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request_only(model: Model, broken: Any, said: str) -> None:
    params = [greedy(), greedy(logits_processors=[lambda s, x: broken(s, x) if len(s) == 3 else x]), greedy()]
    with model.llm(async_scheduling=True) as llm:
        outputs = generate(llm, model.prompts[:3], params)
        assert metric(llm, "kv_cache_blocks_used") == 0
    assert outputs[1].outputs[0].finish_reason == "error" and said in str(outputs[1].outputs[0].stop_reason)
    assert len(outputs[1].outputs[0].token_ids) == 3
    assert [tokens(outputs)[i] for i in (0, 2)] == [model.greedy(model.prompts[i], 12) for i in (0, 2)]


class OnlyEven:
    """A start-up processor: every request, unless it asks for odd ones."""

    def for_request(self, extra_args: dict[str, Any]) -> Any:
        return None if extra_args.get("odd") else self.process

    def process(self, said: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.where(torch.arange(len(logits)) % 2 == 0, -math.inf)


def test_start_up_processors_apply_to_every_request(model: Model) -> None:
    prompt = model.prompts[0]
    with model.llm(logits_processors=[OnlyEven]) as llm:
        even, odd = tokens(generate(llm, [prompt] * 2, [greedy(), greedy(extra_args={"odd": True})]))
    assert all(token % 2 == 0 for token in even) and odd == model.greedy(prompt, 12)
    with model.llm(logits_processors=["torch:clone"]) as llm:
        assert llm.llm_engine.input_processor.extras.startup.plugins == [torch.clone]
        with pytest.raises(RequestError, match="extra_args"):
            generate(llm, [prompt], greedy(extra_args={"odd": True}))
    with pytest.raises(ConfigError, match="nowhere"):
        model.llm(logits_processors=["nowhere:at_all"])


# ---------------------------------------------------------------- endings and streams


def test_a_request_that_repeats_itself_ends(model: Model) -> None:
    prompt = model.prompts[0]
    detection = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 4}
    with model.llm() as llm:
        (output,) = generate(llm, [prompt], greedy(logit_bias={9: 100}, repetition_detection=detection, max_tokens=60))
        (plain,) = generate(llm, [prompt], greedy(repetition_detection={"max_pattern_size": 0}))
    assert output.outputs[0].token_ids == [9] * 8
    assert output.outputs[0].finish_reason == "repetition"
    assert output.outputs[0].stop_reason == "repetition_detected"
    assert plain.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("own", "engine"), [(4, 1), (None, 4)])
def test_stream_interval(model: Model, own: int | None, engine: int) -> None:
    with model.llm(stream_interval=engine) as llm:
        params = greedy(output_kind=RequestOutputKind.DELTA, stream_interval=own, logprobs=0)
        llm.llm_engine.add_request("a", {"prompt_token_ids": model.prompts[0]}, params)
        pieces = []
        while llm.llm_engine.has_unfinished_requests():
            pieces += [output.outputs[0] for output in llm.llm_engine.step()]
    assert [len(piece.token_ids) for piece in pieces] == [1, 4, 4, 3]
    assert [len(piece.logprobs or []) for piece in pieces] == [1, 4, 4, 3]
    assert list(chain(*(piece.token_ids for piece in pieces))) == model.greedy(model.prompts[0], 12)


def test_deltas_with_prompt_logprobs_survive_preemption(model: Model) -> None:
    """A preempted request computes its prompt anew, and its log-probabilities come a second time."""
    params = SamplingParams(
        temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA
    )
    said: dict[str, list[int]] = {}
    with model.llm(**TIGHT) as llm:
        for i, prompt in enumerate(model.prompts[:8]):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params.clone())
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                said.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        assert metric(llm, "num_preemptions") > 0
    assert [said[str(i)] for i in range(8)] == [model.greedy(prompt) for prompt in model.prompts[:8]]
