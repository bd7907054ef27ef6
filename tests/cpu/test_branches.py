"""Several completions of one prompt: forks that share its blocks, streamed, ranked and aborted together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvasir import SamplingParams
from kvasir.errors import RequestError
from kvasir.sampling_params import RequestOutputKind
from tests.engine_builders import SMALL, TIGHT, Model, generate, metric
from tests.pairwise import few

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def model(models: Callable[[str], Model]) -> Model:
    return models("llama")


def asked(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"n": 4, "max_tokens": 10, "ignore_eos": True, "seed": 5, **fields})


def test_branches_share_the_prompts_blocks(model: Model) -> None:
    prompt = (model.prompts[0] * 4)[:62]
    with model.llm(block_size=4, enable_prefix_caching=False, async_scheduling=True) as llm:
        (output,) = generate(llm, [prompt], asked(n=8))
        assert metric(llm, "kv_block_shares") == 7 * 16
        assert metric(llm, "kv_block_copies") == 7, "all but the last to write the half-full block copied it"
        assert metric(llm, "iteration_tokens") == 62 + 7 + 8 * 9, "each fork computed one prompt token"
        assert metric(llm, "kv_cache_blocks_used") == 0
        assert metric(llm, "prompt_tokens") == 62
    texts = [tuple(branch.token_ids) for branch in output.outputs]
    assert [branch.index for branch in output.outputs] == list(range(8))
    assert len(set(texts)) == 8 and all(len(text) == 10 for text in texts)


@pytest.mark.parametrize(
    "settings",
    few([{"async_scheduling": True}, SMALL, TIGHT, {"max_num_seqs": 2}], fast=[TIGHT, {"max_num_seqs": 2}]),
    ids=str,
)
def test_branches_depend_on_seed_and_prompt_alone(model: Model, settings: dict[str, Any]) -> None:
    params = [asked(seed=i, n=1 + i % 5, logprobs=1, prompt_logprobs=0, presence_penalty=0.5) for i in range(8)]
    with model.llm(**settings) as llm:
        together = generate(llm, model.prompts[:8], params)
        assert not llm.llm_engine.has_unfinished_requests()
        assert metric(llm, "kv_cache_blocks_used") == 0
    with model.llm(async_scheduling=False) as llm:
        alone = [generate(llm, [p], s)[0] for p, s in zip(model.prompts, params, strict=False)]
    for left, right, each in zip(together, alone, params, strict=True):
        assert [b.token_ids for b in left.outputs] == [b.token_ids for b in right.outputs]
        assert len(left.outputs) == each.n
        assert left.prompt_logprobs is not None and len(left.prompt_logprobs) == len(left.prompt_token_ids)
        for branch in left.outputs:
            wanted = model.logprobs(left.prompt_token_ids + branch.token_ids)[len(left.prompt_token_ids) - 1 :]
            total = sum(float(wanted[i, token]) for i, token in enumerate(branch.token_ids))
            assert branch.cumulative_logprob is not None
            assert math.isclose(branch.cumulative_logprob, total, abs_tol=1e-3)


def test_best_of_returns_the_likeliest(model: Model) -> None:
    with model.llm() as llm:
        (all_of_them,) = generate(llm, [model.prompts[0]], asked(n=6, logprobs=0))
        (best,) = generate(llm, [model.prompts[0]], asked(n=2, best_of=6))
    totals = sorted((b.cumulative_logprob or 0.0 for b in all_of_them.outputs), reverse=True)
    assert [b.cumulative_logprob for b in best.outputs] == pytest.approx(totals[:2], abs=1e-4)
    assert [b.index for b in best.outputs] == [0, 1] and best.outputs[0].logprobs is None
    with model.llm() as llm, pytest.raises(RequestError, match="streamed"):
        llm.llm_engine.add_request("a", model.prompts[0], asked(n=2, best_of=6))


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_all_branches_are_streamed(model: Model, kind: RequestOutputKind) -> None:
    with model.llm() as llm:
        wanted = [b.token_ids for b in generate(llm, [model.prompts[1]], asked())[0].outputs]
        llm.llm_engine.add_request("a", {"prompt_token_ids": model.prompts[1]}, asked(output_kind=kind))
        said: dict[int, list[int]] = {}
        ends: dict[int, str] = {}
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                finished.append(output.finished)
                for branch in output.outputs:
                    old = said.get(branch.index, []) if kind is DELTA else []
                    said[branch.index] = old + branch.token_ids
                    if branch.finish_reason and kind is DELTA:
                        assert branch.index not in ends, "an end is told once"
                        ends[branch.index] = branch.finish_reason
    assert [said[i] for i in range(4)] == wanted
    assert finished == [False] * (len(finished) - 1) + [True] and len(finished) >= 10
    assert ends == ({} if kind is CUMULATIVE else dict.fromkeys(range(4), "length"))


def test_abort_ends_all_branches(model: Model) -> None:
    with model.llm() as llm:
        engine = llm.llm_engine
        for steps in (0, 1, 2, 6):
            engine.add_request("a", {"prompt_token_ids": model.prompts[1]}, asked(max_tokens=50))
            assert engine.get_num_unfinished_requests() == 1
            for _ in range(steps):
                engine.step()
            (last,) = engine.abort_request("a")
            assert [branch.finish_reason for branch in last.outputs] == ["abort"] * 4 and last.finished
            while engine.client.has_work():
                assert engine.step() == []
            assert metric(llm, "kv_cache_blocks_used") == 0 and not engine.has_unfinished_requests()
