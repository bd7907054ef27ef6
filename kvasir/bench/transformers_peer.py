"""Runs benchmark requests with `generate` of transformers in static batches, for comparison.

A batch is padded to its longest prompt and runs until its longest output is done; only requested tokens are counted. It
uses the same weights, dtype, device and threads, in the same process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvasir.bench.runners import Tokens
from kvasir.bench.workloads import BenchRequest
from kvasir.config.engine import EngineConfig
from kvasir.errors import ConfigError

PAD = 0  # any id works, because it is masked


class TransformersRunner:
    name = "transformers"

    def __init__(self, config: EngineConfig, batch_size: int) -> None:
        if config.load.load_format == "dummy":
            raise ConfigError(
                "--compare transformers needs weights in files, but load_format is dummy. "
                "benchmarks/make_model.py writes a random checkpoint."
            )
        if config.model.hf_overrides:
            raise ConfigError("--compare transformers cannot be used with hf_overrides, which only Kvasir applies.")
        self.batch_size = batch_size
        self.device = config.device.device
        self._load(config)

    def _load(self, config: EngineConfig) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the files are local already
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.version = transformers.__version__
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        dtype = getattr(torch, config.model.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype, attn_implementation="sdpa")
        self.model.to(self.device).eval()
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=PAD)

    def clear_cache(self) -> None:
        return None  # it has no cache between calls

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        tokens: Tokens = []
        for start in range(0, len(requests), self.batch_size):
            tokens += self._batch(requests[start : start + self.batch_size])
        return tokens

    def _batch(self, requests: Sequence[BenchRequest]) -> Tokens:
        width = max(len(request.prompt_token_ids) for request in requests)
        length = max(request.max_tokens for request in requests)
        padding = [width - len(request.prompt_token_ids) for request in requests]
        ids = [[PAD] * n + request.prompt_token_ids for n, request in zip(padding, requests, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in padding]
        output = self.model.generate(
            torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=length,
        )
        answers = output[:, width:].tolist()
        return [answer[: request.max_tokens] for answer, request in zip(answers, requests, strict=True)]

    def padded_tokens(self, requests: Sequence[BenchRequest]) -> int:
        """Number of tokens that `generate` computes for these requests, with padding."""
        total = 0
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            total += len(batch) * (max(len(r.prompt_token_ids) for r in batch) + max(r.max_tokens for r in batch))
        return total
