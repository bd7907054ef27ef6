"""Experts that stay quantized on a GPU: gpt-oss in MXFP4, and adapters of quantized experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, LoRARequest, SamplingParams
from tests.cpu.test_adapter_engine import mixture  # noqa: F401  # a fixture
from tests.cpu.test_quantized_experts import TEXT, gpt_oss  # noqa: F401  # a fixture
from tests.gpu.test_graph_memory import core_of

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 8,
    "max_num_batched_tokens": 1280, "use_tqdm_on_load": False, "generation_config": "kvasir",
}  # fmt: skip
PROMPT = {"prompt_token_ids": TEXT}


@pytest.mark.parametrize("settings", [{}, {"expert_load_metrics": True}])
def test_gpt_oss_in_mxfp4(gpt_oss: tuple[Path, torch.Tensor], settings: dict[str, Any]) -> None:  # noqa: F811
    path, wanted = gpt_oss
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(path), **SETTINGS, **settings) as llm:
        core = core_of(llm)
        assert core.executor.model.layers[0].mlp.experts.stacks
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        llm.generate([PROMPT] * 5, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        stats = core.stats()
        assert stats.late_compilations == stats.late_captures == 0
        counted = sum(sum(layer.values()) for layer in stats.expert_tokens.values())
        assert bool(counted) == bool(settings)
    assert output.prompt_logprobs is not None
    scores = torch.log_softmax(wanted, dim=-1)
    errors = [
        abs(line[token].logprob - float(scores[place, token]))
        for place, (token, line) in enumerate(zip(TEXT[1:], output.prompt_logprobs[1:], strict=True))
        if line is not None
    ]
    assert len(errors) == len(TEXT) - 1 and float(np.median(errors)) < 0.1


@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
def test_adapters_of_experts(mixture: dict[str, Any], quantization: str | None) -> None:  # noqa: F811
    """What an adapter changes is there, and nothing is compiled while requests wait."""
    base, path = mixture
    settings = {**SETTINGS, "enable_lora": True, "max_lora_rank": 8, "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(str(mixture[base].path), **settings) as llm:
        asked = [None, LoRARequest("experts", 1, path)]
        plain, adapted = llm.generate([PROMPT] * 2, params, lora_request=asked, use_tqdm=False)
        assert core_of(llm).stats().late_compilations == 0
    tokens = TEXT + list(adapted.outputs[0].token_ids)
    assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids
    with torch.inference_mode():
        scores = mixture[path](input_ids=torch.tensor([tokens[:-1]])).logits[0, -8:].float().log_softmax(-1)
    assert adapted.outputs[0].logprobs is not None
    errors = [
        abs(line[token].logprob - float(scores[place, token]))
        for place, (token, line) in enumerate(zip(tokens[-8:], adapted.outputs[0].logprobs, strict=True))
    ]
    assert float(np.median(errors)) < 0.5
