"""Requests to a pooling model that are computed in chunks, preempted, aborted and out of time: each vector is the
reference's, and nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvasir import LLM, PoolingParams
from kvasir.errors import RequestError
from tests.cpu.test_interplay import assert_at_rest, lose_memory
from tests.pooling_builders import SIZES, save_bert


def some_settings(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([2, 4])
    settings: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": rng.choice([48, 56, 80]) // block_size + 2,
        "max_num_batched_tokens": rng.randint(8, 40),
        "max_num_seqs": rng.randint(2, 8),
        "async_scheduling": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.6,
        "scheduling_policy": rng.choice(["fair", "fcfs"]),
    }
    return settings | ({"swap_space": 0.0001, "preemption_mode": "swap"} if rng.random() < 0.4 else {})


def run(llm: LLM, asked: dict[str, tuple[list[int], str]], rng: random.Random) -> dict[str, Any]:
    engine, waiting, got = llm.llm_engine, list(asked), {}
    for _ in range(4000):
        while waiting and rng.random() < 0.5:
            name = waiting.pop(0)
            params = PoolingParams(task=asked[name][1], normalize=False)
            timeout = 0.002 if rng.random() < 0.05 else None
            prompt: Any = {"prompt_token_ids": asked[name][0]}
            engine.add_request(name, prompt, params, tenant=rng.choice("ab"), timeout=timeout)
        outputs = engine.abort_request(rng.choice(list(asked))) if rng.random() < 0.03 else []
        for output in [*outputs, *engine.step()]:
            assert output.request_id not in got, "a request ended twice"
            got[output.request_id] = output
        if not waiting and not engine.client.has_work():
            break
    assert not engine.has_unfinished_requests() and len(got) == len(asked)
    return got


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(100, 140), marks=pytest.mark.slow)], ids=str)
def test_vectors_are_those_of_running_alone(tmp_path: Path, seeds: range) -> None:
    torch.manual_seed(7)
    hf = transformers.Qwen2Model(transformers.Qwen2Config(**{**SIZES, "num_key_value_heads": 2})).eval()
    hf.save_pretrained(tmp_path)
    vocab, ended = SIZES["vocab_size"], 0
    for seed in seeds:
        rng = random.Random(seed)
        stem = [rng.randrange(3, vocab) for _ in range(20)]
        asked = {}
        for number in range(16):
            prompt = stem[: rng.randint(0, 20)] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 15))]
            asked[str(number)] = prompt, rng.choice(["embed", "token_embed"])
        pooling, settings = rng.choice(["mean", "max", "cls", "last"]), some_settings(rng)
        pooler = {"pooling_type": pooling, "normalize": False}
        settings |= {"dtype": "float32", "skip_tokenizer_init": True, "runner": "pooling", "pooler_config": pooler}
        with LLM(str(tmp_path), **settings) as llm:
            if rng.random() < 0.4:
                lose_memory(llm, rng)
            got = run(llm, asked, rng)
            assert_at_rest(llm)
        for name, output in got.items():
            if output.finish_reason in ("abort", "timeout"):
                continue
            prompt, task = asked[name]
            with torch.inference_mode():
                states = hf(torch.tensor([prompt])).last_hidden_state[0].numpy()
            vectors = {"cls": states[0], "last": states[-1], "mean": states.mean(0), "max": states.max(0)}
            wanted = states if task == "token_embed" else vectors[pooling]
            np.testing.assert_allclose(output.outputs.data, wanted, atol=3e-5, rtol=1e-4, err_msg=f"seed {seed}")
            ended += 1
    assert ended > 10 * len(seeds)


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_are_added_while_those_before_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    save_bert(tmp_path)
    rng = random.Random(3)
    texts = [[rng.randrange(5, 60) for _ in range(rng.randint(1, 30))] for _ in range(40)]
    alike = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **alike, max_num_batched_tokens=4096) as llm:
        wanted = [output.outputs.data for output in llm.encode(texts, use_tqdm=False)]
    with LLM(str(tmp_path), **alike, async_scheduling=ahead, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        engine = llm.llm_engine
        step, unfinished = engine.step, []

        def count() -> Any:
            unfinished.append(engine.get_num_unfinished_requests())
            return step()

        monkeypatch.setattr(engine, "step", count)
        outputs = llm.encode(texts, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == texts
        for output, vector in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(output.outputs.data, vector, atol=1e-5)
        assert len(unfinished) > 4 and max(unfinished) < len(texts), "all were added before the first step"
        with pytest.raises(RequestError, match=r"^prompt 33: Token id 4000 is not in"):
            llm.encode([*texts[:33], [7, 4000], *texts[33:]], use_tqdm=False)
        assert not engine.has_unfinished_requests()
        (alone,) = llm.encode(texts[5], use_tqdm=False)
        np.testing.assert_allclose(alone.outputs.data, wanted[5], atol=1e-5)
        assert_at_rest(llm)
