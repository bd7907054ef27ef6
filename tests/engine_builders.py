"""Whole engines on tiny models, and transformers' word on what they should say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir import LLM
from kvasir.models import architectures
from kvasir.models.transformer import group_layers
from kvasir.outputs import RequestOutput
from tests.model_builders import make_hf_model, save

SMALL = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4}  # forces chunks and mixed steps
TIGHT = {**SMALL, "num_gpu_blocks_override": 40}  # forces preemption as well


class Model:
    """A checkpoint and transformers' word on it."""

    def __init__(self, name: str, path: Path, **changes: Any) -> None:
        self.hf = make_hf_model(name, **changes)
        self.path = str(save(self.hf, path))
        rng = np.random.default_rng(3)
        self.said: dict[tuple[int, ...], list[int]] = {}  # by transformers, to count and prompt
        self.prompts = [rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 60, 16)]

    def llm(self, **settings: Any) -> LLM:
        settings = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128, "use_tqdm_on_load": False, **settings}
        return LLM(self.path, skip_tokenizer_init=True, **settings)

    def tight(self) -> dict[str, Any]:
        """So few blocks that requests are preempted, or live on what windows give back."""
        config = json.loads((Path(self.path) / "config.json").read_text())
        windows = [
            w if w is not None and w < 128 else None for w in architectures.find(config).read_spec(config).windows
        ]
        return {**TIGHT, "num_gpu_blocks_override": 39 * len(group_layers(windows)) + 1}

    def logprobs(self, text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(self.hf(torch.tensor([text]), use_cache=False).logits[0].double(), -1)

    def greedy(self, prompt: list[int], count: int = 32) -> list[int]:
        key = (count, *prompt)
        if key not in self.said:
            with torch.inference_mode():
                text = self.hf.generate(
                    torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            self.said[key] = text[0, len(prompt) :].tolist()
        return list(self.said[key])


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def metric(llm: LLM, name: str) -> float:
    return next(m.value for m in llm.get_metrics() if m.name == f"kvasir:{name}")
