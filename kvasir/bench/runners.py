"""Runners of benchmark requests, and their timing. A runner takes requests and returns tokens.

Compared runners alternate, in reversed order each round, so that changes of the machine's load affect both alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from kvasir.bench.report import OtherLoad
from kvasir.bench.workloads import BenchRequest
from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.llm import LLM
from kvasir.errors import ConfigError
from kvasir.frontend.requests.prompts import PromptType, TokensPrompt
from kvasir.sampling_params import SamplingParams

PAD = 0  # any id works, because it is masked
Tokens = list[list[int]]  # output tokens of each request


class Runner(Protocol):
    name: str

    def clear_cache(self) -> None:
        """Clear caches, so that the next call does not depend on earlier ones."""

    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        """Generate exactly max_tokens tokens for each request, greedily."""


class KvasirRunner:
    name = "kvasir"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def clear_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        prompts: list[PromptType] = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def counters(self) -> dict[str, int]:
        """Counters of the engine since its start, by metric name without prefix."""
        return {metric.name.partition(":")[2]: int(metric.value) for metric in self.llm.get_metrics()}


class TransformersRunner:
    """`generate` of transformers in static batches, in this process, with the same weights, dtype, device and threads.

    A batch is padded to its longest prompt and runs until its longest output is done. Only requested tokens count.
    """

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
        import torch
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

    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        import torch

        tokens: Tokens = []
        with torch.inference_mode():
            for start in range(0, len(requests), self.batch_size):
                tokens += self._batch(requests[start : start + self.batch_size])
        return tokens

    def _batch(self, requests: Sequence[BenchRequest]) -> Tokens:
        import torch

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


def make_peer(name: str, config: EngineConfig, batch_size: int) -> Runner:
    """The runner to compare with, for the same model, which runs `batch_size` requests at once."""
    if name != "transformers":
        raise ConfigError(f"--compare {name} is not possible. Possible: transformers.")
    return TransformersRunner(config, batch_size)


# ---------------------------------------------------------------- timing


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of one timed call."""

    seconds: float
    tokens: Tokens
    others: float | None  # load by other processes, 0 to 1; None if unknown


def timed(runner: Runner, requests: Sequence[BenchRequest]) -> Timed:
    """Clear the caches, run the requests and measure the time."""
    runner.clear_cache()
    load, started = OtherLoad(), time.perf_counter()
    tokens = runner.generate(requests)
    seconds, others = time.perf_counter() - started, load.fraction()
    for request, answer in zip(requests, tokens, strict=True):
        assert len(answer) == request.max_tokens, f"{runner.name} must run every request to its max_tokens"
    return Timed(seconds, tokens, others)


def alternate(runners: Sequence[Runner], repeat: int, call: Callable[[Runner, int], None]) -> None:
    """Call `call(runner, round)` for all runners, `repeat` times, in reversed order every other round."""
    for round in range(repeat):
        for runner in runners if round % 2 == 0 else reversed(runners):
            call(runner, round)


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Ratios of `above` to `below`, round by round, because the two calls of a round are close in time."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
