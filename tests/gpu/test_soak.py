"""Ten thousand requests of every kind, a tenth of them aborted: nobody is lost, nothing leaks, and greedy text is what
it is alone. And a device whose memory is suddenly full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import LLM, SamplingParams
from kvasir.sampling_params import RequestOutputKind
from tests.model_builders import make_hf_model, save

pytestmark = pytest.mark.gpu

REQUESTS = 10_000
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = make_hf_model("qwen3", hidden_size=64, num_attention_heads=4, head_dim=16)
    return save(hf, tmp_path_factory.mktemp("model"))


def make(path: Path, **settings: Any) -> LLM:
    settings = {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "max_model_len": 128, **settings}
    return LLM(str(path), skip_tokenizer_init=True, use_tqdm_on_load=False, **settings)


def some_params(rng: np.random.Generator) -> SamplingParams:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0, "logit_bias": {5: 2.0}},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.5, "stop_token_ids": [1, 2, 3]},
    ]
    way = ways[int(rng.integers(len(ways)))]
    kind = RequestOutputKind.DELTA if rng.random() < 0.3 else RequestOutputKind.FINAL_ONLY
    return SamplingParams(max_tokens=int(rng.integers(1, 24)), output_kind=kind, **way)


def test_ten_thousand_requests(path: Path) -> None:
    rng = np.random.default_rng(0)
    known = [rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 90, 20)]
    tight = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 16, "num_gpu_blocks_override": 300}
    tight["watermark"] = 0.0  # or nobody would ever be preempted
    with make(path, enforce_eager=True) as llm:
        alone = [llm.generate({"prompt_token_ids": p}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in known]
    with make(path, **tight) as llm:
        engine, added, ended, wrong = llm.llm_engine, 0, set(), []
        alive: list[str] = []
        while added < REQUESTS or engine.has_unfinished_requests():
            for _ in range(min(int(rng.integers(0, 90)), REQUESTS - added)):
                name, params = f"{added % 20} {added}", some_params(rng)
                prompt = rng.integers(2, 96, int(rng.integers(1, 100))).tolist()
                if added % 7 == 0:
                    name, params, prompt = f"known {added % 20} {added}", GREEDY, known[added % 20]
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
                alive.append(name)
                added += 1
            if alive and rng.random() < 0.5:
                doomed = [alive.pop(int(rng.integers(len(alive)))) for _ in range(min(4, len(alive)))]
                ended |= {output.request_id for output in engine.abort_request(doomed)}
            for output in engine.step():
                if not output.finished:
                    continue
                ended.add(output.request_id)
                kind, *rest = output.request_id.split()
                if kind == "known" and output.outputs[0].token_ids != alone[int(rest[0])]:
                    wrong.append(output.request_id)
        stats = engine.client.stats()
        assert len(ended) == REQUESTS
        assert not wrong
        assert stats.num_used_blocks == 0 and stats.num_running == stats.num_waiting == 0
        assert stats.preemptions > 0
        graphs = engine.client.core.executor.runner.graphs.stats  # type: ignore[attr-defined]
        assert graphs.mixed_steps > 10 and graphs.replays > graphs.mixed_steps
        assert stats.late_compilations == stats.late_captures == 0, "something was prepared while requests waited"


def test_a_step_without_memory_is_tried_again_in_smaller_ones(path: Path) -> None:
    rng = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": rng.integers(2, 96, 100).tolist()} for _ in range(128)]
    with make(path, max_num_batched_tokens=12_800, max_num_seqs=128) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (12 << 20)) / total)
        try:
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        scheduler = llm.llm_engine.client.core.scheduler  # type: ignore[attr-defined]
        assert scheduler.limits.max_num_batched_tokens < 12_800
    assert found == wanted
