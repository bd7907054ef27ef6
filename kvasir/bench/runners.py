"""What is measured: something that takes requests and returns tokens. Here Kvasir itself, and how a call is timed.

Runners that stand side by side take turns, each time in the other order, so that a machine's moods hit all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from kvasir.bench.report import Watch
from kvasir.bench.workloads import BenchRequest
from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.llm import LLM
from kvasir.errors import ConfigError
from kvasir.frontend.requests.prompts import PromptType, TokensPrompt
from kvasir.sampling_params import SamplingParams

Tokens = list[list[int]]  # per request, what followed its prompt


class Runner(Protocol):
    name: str

    def forget(self) -> None:
        """Make the next call find nothing of those before it."""

    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        """Greedy, and each request exactly to its max_tokens."""


class KvasirRunner:
    name = "kvasir"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def forget(self) -> None:
        self.llm.reset_prefix_cache()

    def generate(self, requests: Sequence[BenchRequest]) -> Tokens:
        prompts: list[PromptType] = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def counters(self) -> dict[str, int]:
        """What the engine has counted since its start, by name without the prefix."""
        return {metric.name.partition(":")[2]: int(metric.value) for metric in self.llm.get_metrics()}


def make_peer(name: str, config: EngineConfig, batch_size: int) -> Runner:
    """The engine to compare with, on the same model. `batch_size`: how many requests it runs at once."""
    if name != "transformers":
        raise ConfigError(f"--compare {name}: there is only transformers to compare with.")
    from kvasir.bench.transformers_peer import TransformersRunner

    return TransformersRunner(config, batch_size)


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: how long it took, what came of it, and the share of the machine that other processes had meanwhile."""

    seconds: float
    tokens: Tokens
    others: float | None  # 0 to 1; None where the system does not say


def timed(runner: Runner, requests: Sequence[BenchRequest]) -> Timed:
    """Run the requests as if they were the first."""
    runner.forget()
    watch, started = Watch(), time.perf_counter()
    tokens = runner.generate(requests)
    seconds, others = time.perf_counter() - started, watch.others()
    for request, answer in zip(requests, tokens, strict=True):
        assert len(answer) == request.max_tokens, f"{runner.name} must run every request to its max_tokens"
    return Timed(seconds, tokens, others)


def take_turns(runners: Sequence[Runner], repeat: int, call: Callable[[Runner, int], None]) -> None:
    """Call `call(runner, round)` for all, `repeat` times, in turning order."""
    for round in range(repeat):
        for runner in runners if round % 2 == 0 else reversed(runners):
            call(runner, round)


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """How many times `above` is `below`, round by round: rounds stand next to each other in time."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
