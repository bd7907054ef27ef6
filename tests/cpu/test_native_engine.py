"""The engine on the CPU library with a real model: the same text as on plain torch, and a cache of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir import LLM, RequestOutput, SamplingParams
from kvasir.models.native import NativeDecoder
from tests.native_builders import require_library

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Water boils at"]
NEAR = 0.13  # two steps of bfloat16 between logits of 16 and more


def generate(model: Path, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=2)
    with LLM(str(model), max_model_len=256, use_tqdm_on_load=False, kv_cache_memory_bytes=64 << 20, **settings) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def test_greedy_text_equals_plain_torch(starter_model: Path) -> None:
    """Where two tokens are equally good as far as bfloat16 can tell, either may stand; what follows is then its own."""
    require_library()
    theirs = generate(starter_model, attention_backend="torch")
    ours = generate(starter_model, attention_backend="cpu", quantization="none")
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        mine, wanted = one.outputs[0].token_ids, other.outputs[0].token_ids
        differ = next((at for at, pair in enumerate(zip(mine, wanted, strict=False)) if pair[0] != pair[1]), None)
        same += differ is None
        if differ is not None:
            assert other.outputs[0].logprobs is not None
            best, second = sorted(score.logprob for score in other.outputs[0].logprobs[differ].values())[::-1][:2]
            assert best - second < NEAR, f"{one.prompt!r} parts at token {differ}, where the best stands out"
    assert same >= 2


def test_a_gguf_file_runs_as_it_is(starter_model: Path) -> None:
    require_library()
    for settings in ({}, {"kv_cache_dtype": "int8"}, {"cpu_threads": 3}):
        outputs = generate(starter_model, **settings)
        assert "Paris" in outputs[0].outputs[0].text
        assert "100" in outputs[2].outputs[0].text


def test_torch_keeps_to_one_thread_in_steps_and_only_there(
    starter_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_library()
    seen: set[int] = set()
    forward = NativeDecoder.forward

    def watched(*args: Any) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return forward(*args)

    monkeypatch.setattr(NativeDecoder, "forward", watched)
    generate(starter_model, cpu_threads=3)
    assert seen == {1} and torch.get_num_threads() == 3
