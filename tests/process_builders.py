"""Engines in separate processes over fake devices, and helpers to watch processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.executor.fake import DelayExecutor, delayed, fake_config
from kvasir.messages import StepPlan
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import RequestOutputKind, SamplingParams
from tests.conftest import ROOT

T = TypeVar("T")
ECHO = "kvasir.executor.fake:echo"
PATIENCE = 180.0  # seconds to wait for something that takes one second on an idle machine


def slow(seconds: float) -> Callable[[EngineConfig], DelayExecutor]:
    return partial(delayed, delay=seconds)


@contextmanager
def engine(executor: Any = ECHO, **settings: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(fake_config(**settings), executor)
    try:
        yield llm
    finally:
        llm.shutdown()


def run(work: Coroutine[Any, Any, T], seconds: float = PATIENCE) -> T:
    """Run a coroutine in a new event loop, with a time limit."""

    async def limited() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


def tokens(*ids: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(ids)}


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **fields)


def deltas(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return greedy(max_tokens, output_kind=RequestOutputKind.DELTA, **fields)


async def outputs(llm: AsyncLLM, prompt: Any, params: Any, **rest: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **rest)]


async def last(llm: AsyncLLM, prompt: Any, params: Any, **rest: Any) -> RequestOutput:
    return (await outputs(llm, prompt, params, **rest))[-1]


async def until(holds: Callable[[], bool | Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, "the condition did not hold in time"
        await asyncio.sleep(0.01)


async def is_idle(llm: AsyncLLM) -> bool:
    """Whether no request is left in the engine and no block is used."""
    stats = await llm.stats()
    return stats.num_running == stats.num_waiting == stats.num_used_blocks == 0


def engine_pids(llm: AsyncLLM) -> list[int]:
    return [link.process.pid for link in llm._client.connections if link.process is not None]


def gone(pid: int, seconds: float = PATIENCE) -> bool:
    """Whether the process ends in time; a zombie counts as ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def children(pid: int) -> list[int]:
    """Return the live child processes, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append((int(fields[19]), int(stat.parent.name)))  # start time in hundredths of a second, pid
    return [child for _, child in sorted(found)]


def run_timed(command: list[str]) -> tuple[str, float]:
    """Return a program's output and its processor time, which depends little on other programs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return output, used.ru_utime + used.ru_stime


@cache
def seconds_of_torch() -> float:
    """Processor time to import torch, as a measure of this machine's speed; two seconds are usual."""
    return run_timed([sys.executable, "-c", "import torch"])[1]


# ---------------------------------------------------------------- failing executors, which run in the engine's process


class FailingExecutor(DelayExecutor):
    """Fails in its third step."""

    def execute(self, plan: StepPlan) -> None:
        if plan.step == 3:
            raise RuntimeError("the device\nfell off the bus")
        super().execute(plan)


def breaks(config: EngineConfig) -> FailingExecutor:
    return FailingExecutor(config.cache.block_size)


class StepwiseExecutor(DelayExecutor):
    """Returns one result for each character that a test writes to a file."""

    def __init__(self, block_size: int, file: str) -> None:
        super().__init__(block_size)
        self.file = Path(file)
        self.num_results = 0

    def sample(self, inputs: Any = None) -> Any:
        ready = super().sample()
        result = ready.result

        def wait() -> Any:
            self.num_results += 1
            while self.file.stat().st_size < self.num_results:
                time.sleep(0.005)
            return result()

        return SimpleNamespace(result=wait, done=lambda: False)


def one_by_one(config: EngineConfig, file: str) -> StepwiseExecutor:
    return StepwiseExecutor(config.cache.block_size, file)


class HangingExecutor(DelayExecutor):
    """Does not return from its third step until a file exists."""

    def __init__(self, block_size: int, until: str) -> None:
        super().__init__(block_size)
        self.until = until

    def execute(self, plan: StepPlan) -> None:
        while plan.step == 3 and not os.path.exists(self.until):
            time.sleep(0.01)
        super().execute(plan)


def hangs(config: EngineConfig, until: str) -> HangingExecutor:
    return HangingExecutor(config.cache.block_size, until)


def fails_to_start(config: EngineConfig) -> DelayExecutor:
    raise RuntimeError("no such device")


def dies_at_start(config: EngineConfig) -> DelayExecutor:
    os._exit(7)


def starts_slowly(config: EngineConfig) -> DelayExecutor:
    time.sleep(600)
    raise AssertionError("the test should have ended this process")
