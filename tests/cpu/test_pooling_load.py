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
from tests.cpu.test_interplay import assert_at_rest, lose_memory
from tests.pooling_builders import SIZES


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
