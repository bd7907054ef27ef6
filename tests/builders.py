"""Small engines for tests: a real scheduler and cache over a fake device, and the expected output of the fake model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.cache.tier import FixedSwapPolicy, HostTier, SwapPolicy
from kvasir.engine.core import EngineCore
from kvasir.engine.policies import FirstComeFirstServed, Policy
from kvasir.engine.queue import QueueLimits
from kvasir.engine.scheduler import Limits, Scheduler
from kvasir.executor import Executor
from kvasir.executor.fake import EchoExecutor, FakeFuture, echo_next, echo_shift
from kvasir.messages import (
    LOGPROBS,
    NULL_BLOCK,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Part,
    Resource,
    RowSampling,
    SampleInputs,
    StepPlan,
)

VOCAB = 50


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int = 64,
    caching: bool = True,
    chunked: bool = True,
    threshold: int = 0,
    windows: tuple[int | None, ...] = (None,),
    policy: Policy | None = None,
    watermark: float = 0.0,
    host: tuple[int, int] = (0, 0),  # blocks for swapping, and for evicted prefixes
    swap_policy: SwapPolicy = FixedSwapPolicy(True),  # noqa: B008 (it is frozen)
    num_resources: int = 0,
) -> Scheduler:
    tier = HostTier(*host, swap_policy) if any(host) else None
    cache = KVCacheManager(num_blocks, block_size, max_num_seqs, max_model_len, caching, windows, tier)
    limits = Limits(max_num_seqs, budget, chunked, threshold, watermark)
    return Scheduler(limits, cache, FirstComeFirstServed() if policy is None else policy, max_model_len, num_resources)


def make_core(
    lookahead: int = 1, executor: Executor | None = None, queue_limits: QueueLimits | None = None, **settings: Any
) -> EngineCore:
    scheduler = make_scheduler(**settings)
    if executor is None:
        shape = scheduler.rows.tokens.shape
        executor = EchoExecutor(scheduler.cache.block_size, shape[0], shape[1], VOCAB, scheduler.cache.windows)
        executor.allocate_kv(scheduler.cache.pool.num_blocks, scheduler.cache.tier.num_blocks + 1)
    return EngineCore(scheduler, executor, lookahead, queue_limits)


def request(
    key: int, prompt: list[int], max_tokens: int = 8, stop: tuple[int, ...] = (), **fields: Any
) -> EngineRequest:
    sampling = RowSampling(stop_token_ids=stop)
    return EngineRequest(key, np.array(prompt, np.int32), max_tokens, sampling, **fields)


def expected(
    prompt: list[int], max_tokens: int, stop: tuple[int, ...] = (), resource: Resource | None = None
) -> list[int]:
    """Return the output of the fake model for a request that runs alone, one token per step."""
    tokens, shift = list(prompt), 0 if resource is None else echo_shift(resource.digest)
    for _ in range(max_tokens):
        tokens.append(echo_next(tokens, VOCAB, shift))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class ScoringExecutor(EchoExecutor):
    """Returns the log-probabilities of twenty tokens per row, so that a beam search can run."""

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        ready = super().sample(inputs)
        assert self._plan is not None
        lines = np.flatnonzero(self._plan.samples).astype(np.int32)
        best = ready.value.token_ids[lines]
        ids = np.concatenate([best, (best + 7 * np.arange(20)) % self.vocab], axis=1).astype(np.int32)
        values = np.broadcast_to(-0.3 * np.log1p(np.arange(21, dtype=np.float32)) - 0.5, ids.shape)
        ints = {"token_ids": ids, "ranks": np.ones(len(lines), np.int32)}
        ready.value.parts[LOGPROBS] = Part(lines, ints, {"values": np.ascontiguousarray(values)})
        return ready


@dataclass
class AlternatingSwapPolicy:
    """Answers with a given sequence of decisions, over and over."""

    answers: list[bool]
    asked: int = field(default=0)

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        self.asked += 1
        return self.answers[self.asked % len(self.answers)]


class Clock:
    """A clock that tests set, or that advances with every step of a core (see `tick`)."""

    def __init__(self, now: float = 1.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, core: EngineCore, seconds: float = 1.0) -> None:
        """From now on, let every step of the core take `seconds`."""
        execute = core.executor.execute

        def slowly(plan: StepPlan) -> None:
            execute(plan)
            self.now += seconds

        core.executor.execute = slowly  # type: ignore[method-assign]


class Collector:
    """Collects the outputs of a core by request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.waited: dict[int, float] = {}
        self.errors: dict[int, str | None] = {}

    def take(self, output: EngineOutput) -> None:
        for key, line, count in zip(output.keys.tolist(), output.token_ids, output.counts.tolist(), strict=True):
            self.tokens.setdefault(key, []).extend(line[:count].tolist())
        for start in output.started:
            assert start.key not in self.cached, f"request {start.key} started twice"
            self.cached[start.key] = start.num_cached_tokens
            self.waited[start.key] = start.waited
        for end in output.finished:
            assert end.key not in self.reasons, f"request {end.key} ended twice"
            self.reasons[end.key] = end.reason
            self.errors[end.key] = end.error
            if end.token_ids is not None:
                assert end.key not in self.tokens, "tokens were streamed and sent again with the finish"
                self.tokens[end.key] = end.token_ids.tolist()


def run(core: EngineCore, max_steps: int = 5000) -> Collector:
    collector = Collector()
    while core.has_work():
        collector.take(core.run_step())
        max_steps -= 1
        assert max_steps > 0, "the engine does not finish"
    return collector


def check_blocks(core: EngineCore) -> None:
    """Assert that every block is in one state, and that its reference count is the number of rows that hold it."""
    scheduler = core.scheduler
    cache = scheduler.cache
    cache.pool.check()
    cache.tier.check()
    held: Counter[int] = Counter()
    for row in scheduler.rows.order.tolist():
        for line in range(row, len(cache.tables), cache.max_rows):
            blocks = cache.tables[line, : cache.num_blocks[row]].tolist()
            freed = int(cache.num_freed[line])
            assert NULL_BLOCK not in blocks[freed:], "a row lacks a block that it needs"
            held.update(blocks[freed:])
    counts = {int(b): int(cache.pool.ref_counts[b]) for b in np.flatnonzero(cache.pool.ref_counts)}
    assert counts == dict(held), "reference counts differ from the blocks that rows hold"
