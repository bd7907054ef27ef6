"""Encoders on a GPU: graphs give the vectors of steps that are launched kernel by kernel; nothing is compiled late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvasir import LLM
from tests.gpu.test_engine import forbid_waiting

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 258, "pad_token_id": 1}
MODERN = {"local_attention": 32, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {"Bert": {}, "ModernBert": MODERN, "MPNet": {}}
COUNTS = (1, 16, 5, 250, 64, 2, 33, 130)


def lists(*counts: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(counts))
    return [rng.integers(5, 1000, count).tolist() for count in counts]


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **KINDS[request.param])
    getattr(transformers, f"{request.param}Model")(config).save_pretrained(folder)
    return folder


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        a, b = one.outputs.data, other.outputs.data
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b), "more than bfloat16 rounds away"


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_graphs_change_nothing(path: Path, pooling: str) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_batched_tokens": 2048}
    settings |= {"pooler_config": {"pooling_type": pooling, "normalize": True}}
    batches = [lists(count) for count in COUNTS] + [lists(*COUNTS), lists(*(COUNTS * 12)), lists(*[7] * 300)]
    with LLM(str(path), enforce_eager=True, **settings) as llm:
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]
        assert core.executor.runner.graphs is None
        wanted = [llm.encode(batch, use_tqdm=False) for batch in batches]
        tokens = llm.encode(batches[-2], use_tqdm=False, pooling_task="token_embed")
    with LLM(str(path), **settings) as llm:
        core = llm.llm_engine.client.core  # type: ignore[attr-defined]
        graphs, memory = core.executor.runner.graphs, core.memory
        assert set(graphs.forwards) == set(graphs.keys.forwards())
        assert 0 < memory.graphs <= memory.graphs_expected
        for batch, vectors in zip(batches, wanted, strict=True):
            close(llm.encode(batch, use_tqdm=False), vectors)
        close(llm.encode(batches[-2], use_tqdm=False, pooling_task="token_embed"), tokens)
        close(llm.encode(batches[3], use_tqdm=False), wanted[3])  # after larger steps
        stats = core.stats()
        assert graphs.stats.replays > len(batches) and stats.late_captures == stats.late_compilations == 0


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last"])
def test_steps_wait_for_nothing(path: Path, pooling: str) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_batched_tokens": 512}
    with LLM(str(path), pooler_config={"pooling_type": pooling}, **settings) as llm:
        forbid_waiting(llm)
        outputs = llm.encode(lists(*COUNTS), use_tqdm=False)
        assert all(np.isfinite(output.outputs.data).all() for output in outputs)
