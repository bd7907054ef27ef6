"""Logits that are not numbers end the requests that they belong to, with an error, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.outputs import RequestOutput
from tests.engine_builders import Model, generate, tokens

BAD = 7  # the first token of prompts for which the model fails
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = {
    "greedy": PLAIN,
    "sampled": SamplingParams(temperature=1, top_p=0.8, seed=3, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, presence_penalty=0.5),
    "n": SamplingParams(temperature=1, seed=1, n=3, max_tokens=12, ignore_eos=True),
    "beams": SamplingParams(use_beam_search=True, n=2, best_of=2, temperature=0, max_tokens=12),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["torch", "cpu"])
def llm(request: pytest.FixtureRequest, model: Model) -> Iterator[LLM]:
    dtype = "bfloat16" if request.param == "cpu" else "float32"
    with model.llm(attention_backend=request.param, dtype=dtype, max_num_seqs=8, block_size=4) as llm:
        yield llm


def break_model(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make the logits NaN of every sequence that begins with BAD and has more than `after` tokens."""
    runner: Any = llm.llm_engine.client.core.executor.runner  # type: ignore[attr-defined]
    scheduler: Any = llm.llm_engine.client.core.scheduler  # type: ignore[attr-defined]
    sample = runner.sampler.sample

    def broken(logits: torch.Tensor, step: Any, work: Any = ()) -> Any:
        for line, (row, length) in enumerate(zip(step.rows.tolist(), step.positions.tolist(), strict=True)):
            if scheduler.rows.tokens[row, 0] == BAD and length > after:
                logits[line] = torch.nan
        return sample(logits, step, work)

    monkeypatch.setattr(runner.sampler, "sample", broken)


def ends(outputs: list[RequestOutput]) -> list[str | None]:
    return [each.finish_reason for output in outputs for each in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_ends_the_request_with_an_error(kind: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 6, 8, 9], [BAD, 5, 6, 8, 9, 10, 11, 12], [9, 8], [BAD, 1]]
    alone = tokens(generate(llm, [prompts[0], prompts[2]], PLAIN))
    with monkeypatch.context() as patch:
        break_model(llm, patch, after=8)
        params = [PLAIN, KINDS[kind], PLAIN, KINDS[kind]]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert set(ends([outputs[1], outputs[3]])) == {"error"}
    assert "NaN" in str(outputs[1].outputs[0].stop_reason)
    assert tokens([outputs[0], outputs[2]]) == alone, "the others go on as if nothing had been"
    if kind in ("greedy", "sampled"):
        assert len(outputs[3].outputs[0].token_ids) == 7, "tokens before the fault are kept"
    again = generate(llm, [prompts[1]], PLAIN)
    assert ends(again) == ["length"] and again[0].num_cached_tokens == 0, "blocks of a broken request are not cached"
