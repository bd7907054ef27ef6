"""Runners of benchmark requests, and their timing. A runner takes requests and returns tokens; here is Kvasir's.

Compared runners alternate, in reversed order each round, so that changes of the machine's load affect both alike.
"""

from __future__ import annotations

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


def make_peer(name: str, config: EngineConfig, batch_size: int) -> Runner:
    """The runner to compare with, for the same model, which runs `batch_size` requests at once."""
    if name != "transformers":
        raise ConfigError(f"--compare {name} is not possible. Possible: transformers.")
    from kvasir.bench.transformers_peer import TransformersRunner

    return TransformersRunner(config, batch_size)


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
