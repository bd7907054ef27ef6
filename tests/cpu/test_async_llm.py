"""AsyncLLM with real models: what crosses the boundary comes out as it does in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvasir import AsyncLLM, EngineArgs, SamplingParams
from kvasir.errors import ConfigError, EngineDeadError, RequestError
from kvasir.sampling_params import BeamSearchParams
from tests.conftest import ROOT
from tests.cpu.test_engine import Model
from tests.process_builders import children, engine_pids, gone, greedy, is_idle, last, run, tokens, until

SMALL = {"kv_cache_memory_bytes": 16 << 20, "max_model_len": 128, "use_tqdm_on_load": False, "block_size": 4}
PLUGIN = "tests.cpu.test_async_llm:OnlyToken"


class OnlyToken:
    """A start-up processor: requests that name a token get nothing else."""

    def for_request(self, extra_args: dict[str, Any]) -> Any:
        token = extra_args.get("only")
        if token is None:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = torch.full_like(logits, float("-inf"))
            kept[token] = 0.0
            return kept

        return process


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


def start(model: Model, **settings: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(EngineArgs(model.path, skip_tokenizer_init=True, **{**SMALL, **settings}))


PARAMS = {
    "greedy with logprobs": SamplingParams(max_tokens=8, temperature=0, logprobs=3),
    "seeded": SamplingParams(max_tokens=8, seed=5, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        max_tokens=8, seed=5, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 2.0}
    ),
    "prompt logprobs": SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2, flat_logprobs=True, logprobs=1),
    "branches": SamplingParams(max_tokens=8, seed=3, n=3, logprobs=0),
    "allowed": SamplingParams(max_tokens=8, seed=3, allowed_token_ids=[5, 6, 7, 8], min_tokens=3),
    "moving average": SamplingParams(max_tokens=8, seed=3, top_ema_p=0.9, top_ema_d=4),
    "beams": BeamSearchParams(beam_width=3, max_tokens=6),
}


def test_everything_comes_out_as_in_one_process(model: Model) -> None:
    async def work(llm: AsyncLLM, prompt: list[int]) -> dict[str, Any]:
        found = await asyncio.gather(*(last(llm, tokens(*prompt), params) for params in PARAMS.values()))
        await until(lambda: is_idle(llm))
        return dict(zip(PARAMS, found, strict=True))

    prompt = model.prompts[0]
    with model.llm(block_size=4) as offline:
        expected = {
            name: offline.generate(
                tokens(*prompt),
                params.to_sampling_params() if isinstance(params, BeamSearchParams) else params,
                use_tqdm=False,
            )[0]
            for name, params in PARAMS.items()
        }
    llm = start(model)
    try:
        found = run(work(llm, prompt))
    finally:
        llm.shutdown()
    for name, output in found.items():
        assert [text.token_ids for text in output.outputs] == [text.token_ids for text in expected[name].outputs], name
        for text, other in zip(output.outputs, expected[name].outputs, strict=True):
            assert text.finish_reason == other.finish_reason
            if other.cumulative_logprob is not None:
                assert text.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        assert (output.prompt_logprobs is None) == (expected[name].prompt_logprobs is None), name
    assert len(found["prompt logprobs"].prompt_logprobs) == len(prompt)


def test_processors_by_import_path(model: Model) -> None:
    async def work(llm: AsyncLLM) -> None:
        plain, only = await asyncio.gather(
            last(llm, tokens(1, 2, 3), greedy(5)),
            last(llm, tokens(1, 2, 3), greedy(5, extra_args={"only": 9})),
        )
        assert only.outputs[0].token_ids == [9] * 5 != plain.outputs[0].token_ids
        with pytest.raises(RequestError, match="module:name"):
            await last(llm, tokens(1), greedy(5, logits_processors=[lambda ids, logits: logits]))

    llm = start(model, logits_processors=[PLUGIN])
    try:
        run(work(llm))
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_two_copies_of_the_model(model: Model) -> None:
    async def work(llm: AsyncLLM) -> list[list[int]]:
        found = await asyncio.gather(
            *(last(llm, tokens(*prompt), greedy(12, ignore_eos=True)) for prompt in model.prompts[:8])
        )
        sent = [metric.value for metric in await llm.get_metrics() if metric.name == "kvasir:router_requests"]
        assert len(sent) == 2 and min(sent) > 0
        return [output.outputs[0].token_ids for output in found]

    llm = start(model, data_parallel_size=2)
    try:
        assert run(work(llm)) == [model.greedy(prompt, 12) for prompt in model.prompts[:8]]
    finally:
        llm.shutdown()


def test_a_config_error_of_the_worker_stays_one(model: Model) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        start(model, kv_cache_memory_bytes=100)


@pytest.mark.slow
def test_a_dead_worker_is_a_dead_engine(model: Model) -> None:
    async def work(llm: AsyncLLM, pid: int) -> None:
        running = asyncio.create_task(last(llm, tokens(*model.prompts[0]), greedy(60)))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker 1 ended"):
            await running

    llm = start(model, tensor_parallel_size=2)
    try:
        (pid,) = engine_pids(llm)
        workers = children(pid)
        assert len(workers) == 2
        run(work(llm, workers[1]))
        assert all(gone(each) for each in (pid, *workers))
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_workers_end_when_the_parent_is_killed(model: Model) -> None:
    program = (
        "import sys, time; from tests.cpu.test_async_llm import *\n"
        "settings = {'skip_tokenizer_init': True, 'tensor_parallel_size': 2, **SMALL}\n"
        "llm = AsyncLLM.from_engine_args(EngineArgs(sys.argv[1], **settings))\n"
        "print(*engine_pids(llm), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, model.path], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    workers = children(pid)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(each) for each in (pid, *workers))
