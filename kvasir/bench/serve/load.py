"""Sends requests when they are due, at most so many at once, and waits for all answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from kvasir.bench.serve.answer import Answer
from kvasir.bench.serve.http import Client


@dataclass(frozen=True, slots=True)
class Load:
    bodies: Sequence[bytes]
    times: Sequence[float]  # seconds from the start, in order
    max_concurrency: int | None = None  # None: the server gets every request when it is due


@dataclass(slots=True)
class Outcome:
    answers: list[Answer]
    seconds: float
    client_cpu: float  # share of one core that this process used
    peak: int  # most requests in flight at once


async def run(
    client: Client, load: Load, keep_text: bool = False, on_end: Callable[[Answer], None] = lambda answer: None
) -> Outcome:
    gate: AbstractAsyncContextManager[object] = (
        nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    )
    answers = [Answer(keep_text) for _ in load.bodies]
    flying = peak = 0

    async def one(body: bytes, answer: Answer) -> None:
        nonlocal flying, peak
        async with gate:
            flying += 1
            peak = max(peak, flying)
            await client.ask(body, answer)
            flying -= 1
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
