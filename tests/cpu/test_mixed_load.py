"""Every way to decode at once, in caches too small for it, with aborts: each text is that of running alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvasir import LLM, SamplingParams
from kvasir.errors import RequestError
from tests.engine_builders import Model, generate, metric


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


@pytest.fixture(scope="module")
def alone(model: Model) -> Iterator[LLM]:
    with model.llm(async_scheduling=False) as llm:
        yield llm


def some_params(rng: random.Random) -> SamplingParams:
    length: dict[str, Any] = {"max_tokens": rng.randint(1, 14), "ignore_eos": True}
    kind = rng.randrange(4)
    if kind == 0:
        width = rng.randint(1, 5)
        search: dict[str, Any] = {"n": width, "num_beam_groups": rng.choice([1, width])}
        search |= {"early_stopping": rng.choice([True, False, "never"]), "diversity_penalty": rng.choice([0.0, 0.7])}
        stops = rng.sample(range(96), rng.randint(0, 25))
        return SamplingParams(use_beam_search=True, temperature=0, stop_token_ids=stops, **search, **length)
    if kind == 1:
        return SamplingParams(n=rng.randint(2, 5), seed=rng.randrange(99), presence_penalty=0.4, **length)
    if kind == 2:
        shift = [lambda said, logits: logits.roll(len(said) % 4)] if rng.random() < 0.5 else None
        return SamplingParams(seed=rng.randrange(99), top_ema_p=0.5, top_ema_d=2, logits_processors=shift, **length)
    return SamplingParams(temperature=0, prompt_logprobs=rng.choice([None, 1]), **length)


def some_settings(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 4])
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": 40 // block_size * rng.choice([1, 2, 3]) + 2,
        "max_model_len": 40,
        "max_num_seqs": rng.randint(5, 9),
        "max_num_batched_tokens": rng.randint(9, 40),
        "async_scheduling": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.7,
    }


@pytest.mark.parametrize("seeds", [range(2, 5), pytest.param(range(20), marks=pytest.mark.slow)], ids=str)
def test_texts_are_those_of_running_alone(model: Model, alone: LLM, seeds: range) -> None:
    preemptions = 0.0
    for seed in seeds:
        rng = random.Random(seed)
        asked = {
            str(i): ([rng.randrange(2, 96) for _ in range(rng.randint(1, 20))], some_params(rng)) for i in range(10)
        }
        said: dict[str, list[list[int]]] = {}
        with model.llm(**some_settings(rng)) as llm:
            engine = llm.llm_engine
            for name, (prompt, params) in asked.items():
                try:
                    engine.add_request(name, {"prompt_token_ids": prompt}, params)
                except RequestError as error:
                    assert "beams" in str(error)  # more than this cache could ever hold
            for _ in range(5000):
                for output in engine.step():
                    if output.finished:
                        said[output.request_id] = [branch.token_ids for branch in output.outputs]
                if rng.random() < 0.01:
                    engine.abort_request(rng.choice(list(asked)))
                if not engine.client.has_work():
                    break
            assert not engine.has_unfinished_requests(), f"seed {seed} does not come to an end"
            assert metric(llm, "kv_cache_blocks_used") == 0
            preemptions += metric(llm, "num_preemptions")
        for name, text in said.items():
            prompt, params = asked[name]
            (wanted,) = generate(alone, [prompt], params)
            assert text == [branch.token_ids for branch in wanted.outputs], f"seed {seed}, {params}"
    assert preemptions > (20 if len(seeds) == 20 else 0)
