"""Counts of tokens by expert, against the choices that transformers' routers make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.engine.observers import ExpertCounter
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.messages import ExpertTokens, StepResult
from tests.model_builders import make_hf_model, save

TEXTS = [np.random.default_rng(seed).integers(2, 90, 19 + seed).tolist() for seed in range(3)]
EXACT = {"dtype": "float32", "attention_backend": "torch", "device": "cpu", "skip_tokenizer_init": True}


def chosen_by_transformers(model: Any) -> dict[int, torch.Tensor]:
    """How many tokens of all texts each expert of a layer gets; of the last layer, only the texts' last tokens."""
    counts: dict[int, torch.Tensor] = {}
    last = model.config.num_hidden_layers - 1
    for layer, block in enumerate(model.model.layers):
        router = getattr(block.mlp, "gate", None)
        if router is None:
            continue
        counts[layer] = torch.zeros(model.config.num_local_experts, dtype=torch.int64)

        def count(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
            chosen = output[-1][-1:] if layer == last else output[-1]
            counts[layer] += torch.bincount(chosen.flatten(), minlength=len(counts[layer]))

        router.register_forward_hook(count)
    for text in TEXTS:
        with torch.inference_mode():
            model(torch.tensor([text]), use_cache=False)
    return counts


def counted(path: Path, **settings: Any) -> dict[tuple[str, str], float]:
    with LLM(str(path), **EXACT, use_tqdm_on_load=False, max_num_batched_tokens=16, **settings) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        llm.generate([{"prompt_token_ids": text} for text in TEXTS], params, use_tqdm=False)
        return {
            (metric.labels["layer"], metric.labels["experts"]): metric.value
            for metric in llm.get_metrics()
            if metric.name == "kvasir:expert_tokens"
        }


@pytest.mark.parametrize("experts", [5, 20])
def test_counts_are_those_of_transformers(experts: int, tmp_path: Path) -> None:
    """Each expert by itself, or ranges of three."""
    model = make_hf_model("mixtral", num_local_experts=experts)
    wanted = chosen_by_transformers(model)
    width = 1 if experts == 5 else 3
    names = [str(e) for e in range(5)] if width == 1 else ["0-2", "3-5", "6-8", "9-11", "12-14", "15-17", "18-19"]
    got = counted(save(model, tmp_path / "model"))
    assert len(got) == 3 * len(names)
    for layer, counts in wanted.items():
        ranges = [int(part.sum()) for part in counts.split(width)]
        found = [got[str(layer), name] for name in names]
        if layer < 2:  # of the last layer, chunks that end no prompt send their last tokens, too
            assert found == ranges
        else:
            assert all(ours >= theirs for ours, theirs in zip(found, ranges, strict=True))


def test_ranks_count_the_same(tmp_path: Path) -> None:
    path = save(make_hf_model("mixtral", num_local_experts=6), tmp_path / "model")
    shared = counted(path, tensor_parallel_size=2, enable_expert_parallel=True)
    assert shared == counted(path) and sum(shared.values()) > 0


def test_layers_without_experts_and_counting_turned_off(tmp_path: Path) -> None:
    path = save(make_hf_model("deepseek_v3"), tmp_path / "model")
    assert {layer for layer, _ in counted(path)} == {"1", "2"}
    assert counted(path, expert_load_metrics=False) == {}


def test_several_engines_add_up() -> None:
    counter = ExpertCounter()
    assert counter.tokens() == {}
    result = StepResult(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
    counter.finished(result)
    result.experts = ExpertTokens((1, 3), ("0", "1"), np.array([[1, 2], [3, 4]]))
    counter.finished(result)
    counter.finished(result)
    assert counter.tokens() == {1: {"0": 2, "1": 4}, 3: {"0": 6, "1": 8}}
    from kvasir.engine.stats import EngineStats

    one, other = (EngineStats(*[0] * 16, expert_tokens=found) for found in (counter.tokens(), {1: {"0": 5, "1": 0}}))
    assert sum_stats([one, other]).expert_tokens == {1: {"0": 7, "1": 4}, 3: {"0": 6, "1": 8}}
