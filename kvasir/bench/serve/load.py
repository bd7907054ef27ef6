"""Generates the load: sends requests at their arrival times, with limited concurrency, and waits for all answers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

from kvasir.bench.serve.client import LoadClient, TimedAnswer
from kvasir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadPlan:
    bodies: Sequence[bytes]
    times: Sequence[float]  # seconds from the start, in order
    max_concurrency: int | None = None  # None means no limit


@dataclass(slots=True)
class Outcome:
    answers: list[TimedAnswer]
    seconds: float
    client_cpu: float  # fraction of a core that this process used
    peak: int  # maximum number of concurrent requests


async def run(
    client: LoadClient,
    load: LoadPlan,
    keep_text: bool = False,
    on_end: Callable[[TimedAnswer], None] = lambda answer: None,
) -> Outcome:
    gate: AbstractAsyncContextManager[object] = (
        nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    )
    answers = [TimedAnswer(keep_text) for _ in load.bodies]
    running = peak = 0

    async def one(body: bytes, answer: TimedAnswer) -> None:
        nonlocal running, peak
        async with gate:
            running += 1
            peak = max(peak, running)
            await client.ask(body, answer)
            running -= 1
        on_end(answer)

    cpu, start = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for body, due, answer in zip(load.bodies, load.times, answers, strict=True):
            wait = start + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            answer.late = max(0.0, time.perf_counter() - start - due) if due else 0.0
            tasks.create_task(one(body, answer))
    seconds = time.perf_counter() - start
    return Outcome(answers, seconds, (time.process_time() - cpu) / seconds, peak)


# ---------------------------------------------------------------- arrival times, in seconds from the start


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Times between requests follow a gamma distribution: burstiness 1 is a Poisson process, a lower value gives bursts
    and a higher one more even times."""

    rate: float = math.inf  # requests per second
    burstiness: float = 1.0
    ramp: str | None = None  # "linear" or "exponential": from `rate` to `end_rate` over the run
    end_rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--request-rate", self.rate), ("--burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value:g}.")
        if self.ramp is not None and (self.end_rate is None or not 0 < self.end_rate < math.inf):
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0.")
        if self.ramp is not None and self.rate == math.inf:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps.")

    def times(self, count: int, seed: int = 0) -> list[float]:
        if self.rate == math.inf:
            return [0.0] * count
        rng = random.Random(seed)
        gaps = [self._gap(rng, rate) for rate in self._rates(count)]
        return list(accumulate([0.0, *gaps[1:]])) if count else []

    def _rates(self, count: int) -> Iterator[float]:
        for i in range(count):
            share = i / max(1, count - 1)
            if self.ramp is None or self.end_rate is None:
                yield self.rate
            elif self.ramp == "linear":
                yield self.rate + (self.end_rate - self.rate) * share
            else:
                yield self.rate * (self.end_rate / self.rate) ** share

    def _gap(self, rng: random.Random, rate: float) -> float:
        return rng.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness))


def from_trace(stamps: Sequence[float], speedup: float) -> list[float]:
    """The times of a trace from its first request on, divided by `speedup`."""
    if not speedup > 0:
        raise ConfigError(f"--trace-speedup must be more than 0, not {speedup:g}.")
    return [(stamp - stamps[0]) / speedup for stamp in stamps]
