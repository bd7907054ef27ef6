"""When a process dies, all callers get an error at once, and no process is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import ConfigError, EngineDeadError, EngineError, RequestError
from kvasir.executor.fake import fake_config
from kvasir.sampling_params import BeamSearchParams
from tests.conftest import ROOT
from tests.process_builders import (
    PATIENCE,
    breaks,
    children,
    dies_at_start,
    engine,
    engine_pids,
    fails_to_start,
    gone,
    greedy,
    hangs,
    is_idle,
    last,
    run,
    slow,
    tokens,
    until,
)

MANY = {"max_num_seqs": 256, "max_model_len": 2048}
ANSWER_SECONDS = 30.0  # of which it takes one; without an answer, callers would wait for ever


def start_many(llm: AsyncLLM, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(last(llm, tokens(i % 40, 1, 2), greedy(1000), request_id=str(i))) for i in range(count)]


async def all_there(llm: AsyncLLM, count: int) -> bool:
    stats = await llm.stats()
    return stats.num_running + stats.num_waiting == count


def test_killing_the_engine_answers_a_thousand_callers() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = start_many(llm, 1000)
        asked = asyncio.create_task(llm.stats())
        await until(lambda: all_there(llm, 1000))
        await asked
        (pid,) = engine_pids(llm)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < ANSWER_SECONDS
        assert {type(error) for error in errors} == {EngineDeadError}
        assert "SIGKILL" in str(errors[0])
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await last(llm, tokens(1), greedy())
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.stats()
        assert llm.errored and not llm.is_running and "SIGKILL" in str(llm.dead_error)
        assert len(llm.output_processor) == 0

    with engine(slow(0.01), **MANY) as llm:
        run(work(llm))


def test_an_idle_engine_that_was_killed_is_noticed_by_check_health() -> None:
    with engine() as llm:
        run(llm.check_health())
        (pid,) = engine_pids(llm)
        os.kill(pid, signal.SIGKILL)
        run(until(lambda: stuck(llm)))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            run(llm.check_health())


def test_aborting_half_of_a_thousand() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = start_many(llm, 1000)
        await until(lambda: all_there(llm, 1000))
        await llm.abort(str(i) for i in range(0, 1000, 2))
        aborted = await asyncio.gather(*tasks[::2])
        assert {output.outputs[0].finish_reason for output in aborted} == {"abort"}
        await until(lambda: all_there(llm, 500))
        assert not any(task.done() for task in tasks[1::2])
        await llm.abort(str(i) for i in range(1000))
        await asyncio.gather(*tasks[1::2])
        await until(lambda: is_idle(llm))

    with engine(slow(0.1), **MANY) as llm:  # a request takes 100 s, if nobody ends it
        run(work(llm))


PARENT = """
import asyncio, sys
from tests.process_builders import *
from tests.unit.test_engine_process import *
llm = AsyncLLM(fake_config(**MANY), {executor})
async def work():
    tasks = start_many(llm, 50)
    await until(lambda: {ready})
    print(*engine_pids(llm), llm.address, flush=True)
    {then}
asyncio.run(work())
"""


def start_parent(
    executor: str = "slow(0.01)", ready: str = "all_there(llm, 50)", then: str = "await asyncio.gather(*tasks)"
) -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """A process that owns an engine with requests, the engine's process, and where the two meet."""
    program = PARENT.format(executor=executor, ready=ready, then=then)
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    *pids, address = parent.stdout.readline().split()
    parent.stdout.close()
    return parent, [int(pid) for pid in pids], Path(address.decode())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_parent_ends_the_engine(how: signal.Signals) -> None:
    parent, pids, address = start_parent()
    parent.send_signal(how)
    assert parent.wait(PATIENCE) == -how
    assert all(gone(pid) for pid in pids)
    assert not address.exists(), "nothing is left in the file system"


def test_a_parent_that_ends_without_a_word_leaves_no_engine() -> None:
    parent, pids, address = start_parent(then="return")
    assert parent.wait(PATIENCE) == 0
    assert all(gone(pid) for pid in pids) and not address.exists()


def test_an_engine_that_hangs_ends_with_its_parent() -> None:
    in_third_step = "llm._client.connections[0].progress.num_steps >= 3"
    parent, pids, address = start_parent("partial(hangs, until='/nowhere')", in_third_step)
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids) and not address.exists()


def test_a_failing_device_is_one_sentence_for_everybody() -> None:
    async def work(llm: AsyncLLM) -> None:
        errors = await asyncio.gather(*start_many(llm, 20), return_exceptions=True)
        assert {type(error) for error in errors} == {EngineDeadError}
        message = "a step failed: RuntimeError: the device fell off the bus"
        assert {str(error) for error in errors} == {message}
        with pytest.raises(EngineDeadError, match=message):
            await llm.check_health()

    with engine(breaks, **MANY) as llm:
        pids = engine_pids(llm)
        run(work(llm))
        assert all(gone(pid) for pid in pids)


def test_start_up_failures_are_the_childs_own() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(EngineError, match="could not be started: RuntimeError: no such device"):
        AsyncLLM(fake_config(), fails_to_start)
    with pytest.raises(EngineError, match="exit code 7"):
        AsyncLLM(fake_config(), dies_at_start)
    with pytest.raises(ConfigError, match="KV cache"):
        AsyncLLM(fake_config(num_gpu_blocks_override=2), "kvasir.executor.fake:echo")
    assert set(children(os.getpid())) <= before, "none of them is left"


def test_a_stuck_step_is_seen_by_check_health(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    async def work(llm: AsyncLLM) -> None:
        request = asyncio.create_task(last(llm, tokens(1), greedy(30)))
        await until(lambda: llm._client.connections[0].progress.num_steps >= 3)  # in the step that hangs
        await until(lambda: stuck(llm))
        with pytest.raises(EngineError, match="stall_timeout=0.3"):
            await llm.check_health()
        assert llm.is_running and not request.done()
        go_on.touch()
        assert (await request).finished
        await until(lambda: healthy(llm))

    with engine(partial(hangs, until=str(go_on)), stall_timeout=0.3) as llm:
        run(llm.check_health())
        run(work(llm))


async def healthy(llm: AsyncLLM) -> bool:
    try:
        await llm.check_health()
    except EngineError:
        return False
    return True


async def stuck(llm: AsyncLLM) -> bool:
    return not await healthy(llm)


def test_an_owner_that_dies_while_the_engine_starts() -> None:
    program = (
        "import os\n"
        "from tests.process_builders import *\n"
        "from kvasir.frontend.clients.engine_client import EngineClient\n"
        "engines = EngineClient.start(fake_config(), starts_slowly)\n"
        "print(engines._processes[0].process.pid, engines.directory, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    parent.stdout.close()
    parent.kill()
    parent.wait()
    assert gone(int(pid)) and not Path(directory.decode()).exists()


def test_a_request_that_nobody_takes_up_is_seen_by_check_health() -> None:
    async def work(llm: AsyncLLM) -> None:
        assert (await last(llm, tokens(1), greedy(3))).finished
        (pid,) = engine_pids(llm)
        await until(lambda: llm._client.connections[0].progress.seconds_in_step() == 0)  # at rest, not in a step
        os.kill(pid, signal.SIGSTOP)
        try:
            await llm.check_health()
            request = asyncio.create_task(last(llm, tokens(2), greedy(3)))
            await until(lambda: stuck(llm))
            with pytest.raises(EngineError, match="has not (started on a request|answered) for .* stall_timeout=0.3"):
                await llm.check_health()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await request).finished
        await until(lambda: healthy(llm))

    with engine(stall_timeout=0.3) as llm:
        run(work(llm))


def test_a_hanging_engine_is_noticed_without_requests_and_holds_no_request_beyond_its_deadline() -> None:
    async def work(llm: AsyncLLM) -> None:
        (pid,) = engine_pids(llm)
        await llm.check_health()
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: stuck(llm))
            with pytest.raises(EngineError, match="has not answered for .* stall_timeout=0.3"):
                await llm.check_health()
            asked = [last(llm, tokens(i), greedy(3), timeout=0.2) for i in range(3)]
            asked.append(last(llm, tokens(5), greedy(3), timeout=0.2, arrival_time=time.time() - 10))
            asked.append(last(llm, tokens(7), BeamSearchParams(beam_width=2, max_tokens=4), timeout=0.2))
            started = time.monotonic()
            outputs = await asyncio.gather(*asked)
            assert {each.finish_reason for output in outputs for each in output.outputs} == {"timeout"}
            assert time.monotonic() - started < 10, "and not only when it goes on"
            assert len(llm.output_processor) == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: healthy(llm))
        assert (await last(llm, tokens(1), greedy(3), timeout=60)).outputs[0].finish_reason == "length"

    with engine(stall_timeout=0.3) as llm:
        run(work(llm))


def test_a_request_waits_from_when_it_was_sent_not_from_one_that_was_refused_before() -> None:
    async def work(llm: AsyncLLM) -> None:
        (pid,), (connection,) = engine_pids(llm), llm._client.connections
        with pytest.raises(RequestError, match="beams"):
            await last(llm, tokens(1), BeamSearchParams(beam_width=64, max_tokens=4))
        connection._last_sent = (connection._last_sent[0] - 1000.0, connection._last_sent[1])  # that was long ago
        os.kill(pid, signal.SIGSTOP)
        try:
            request = asyncio.create_task(last(llm, tokens(2), greedy(3)))
            await asyncio.sleep(0)
            assert llm.output_processor.request_ids(), "it was sent"
            await llm.check_health()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await request).finished

    with engine(stall_timeout=100.0) as llm:
        run(work(llm))
