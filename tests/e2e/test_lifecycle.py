"""How a server starts, drains, loses its clients and its engine, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import web
from tests.server_process import ROOT, LiveServer, events, until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
SLOW = {"make": "kvasir.executor.fake:delayed", "delay": 0.01, "token": 42}


async def ask(url: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=web.PATIENCE) as client:
        return await client.post(f"{url}/v1/chat/completions", json={**CHAT, **body})


async def running(server: LiveServer, count: int) -> None:
    """Until so many requests run in the engine."""

    def is_so() -> bool:
        return bool(web.get(f"{server.url}/load").json()["running"] == count)

    await asyncio.to_thread(until, is_so, f"{count} running", server)


async def draining(server: LiveServer) -> None:
    """Until it says so."""

    def is_so() -> bool:
        reply = web.get(f"{server.url}/ready")
        return reply.status_code == 503 and reply.json()["status"] == "draining"

    await asyncio.to_thread(until, is_so, "the drain", server)


# ---------------------------------------------------------------- the start


def slow_to_start(config: Any) -> Any:
    """An executor whose model takes long to load: until the file that KVASIR_TEST_GATE names is there."""
    from kvasir.executor.fake import echo

    gate = Path(os.environ["KVASIR_TEST_GATE"])
    while not gate.exists():
        time.sleep(0.01)
    if gate.read_text():
        raise RuntimeError(gate.read_text())
    return echo(config)


def gated(starter_model: Path, gate: Path) -> LiveServer:
    environment = {"KVASIR_TEST_GATE": str(gate)}
    return LiveServer.fake(starter_model, executor="tests.e2e.test_lifecycle:slow_to_start", environment=environment)


def test_ready_tells_the_phase(starter_model: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(starter_model, gate) as server:
        until(lambda: web.get(f"{server.url}/ready").json()["status"] == "model", "the model loads", server)
        reply = web.get(f"{server.url}/ready")
        assert reply.status_code == 503
        assert web.get(f"{server.url}/health").status_code == 200, "it lives"
        assert web.get(f"{server.url}/v1/models").status_code == 503
        assert asyncio.run(ask(server.url)).json()["error"]["code"] == "starting"
        gate.touch()
        body = web.get(f"{server.wait_until_ready().url}/ready").json()
        assert body["status"] == "ready" and body["reason"] is None
        own = {name for name in body["startup_seconds"] if not name.startswith("engine: ")}
        assert own == {"settings", "model", "first token", "total"}
        assert server.metric("kvasir:startup_seconds", phase="model") == pytest.approx(body["startup_seconds"]["model"])
        server.wait_for_log("start-up: model took [0-9.]+ s")


def test_a_failed_start_is_one_line(starter_model: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gated(starter_model, gate) as server:
        assert server.url
        gate.write_text("the weights are gone; lower gpu_memory_utilization or set enable_prefix_caching=False")
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
        assert (
            last.startswith("kvasir: error: ")
            and "the weights are gone; lower --gpu-memory-utilization or set --no-enable-prefix-caching" in last
        )


@pytest.mark.slow
def test_sigterm_while_it_starts(starter_model: Path, tmp_path: Path) -> None:
    with gated(starter_model, tmp_path / "gate") as server:
        assert server.url
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    def run(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "kvasir.entrypoints.openai.api_server", *flags]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=web.PATIENCE)
        return ran.returncode, ran.stderr.splitlines()[-1]

    assert run("--model", str(tmp_path / "no"), "--port", "0")[0] == 2
    code, said = run("--model", "m", "--api-key-file", str(tmp_path / "no.yaml"))
    assert code == 2 and "no.yaml cannot be read" in said
    code, said = run("--model", "m", "--ssl-keyfile", "x")
    assert code == 2 and "both --ssl-keyfile and --ssl-certfile" in said
    code, said = run("--model", "m", "--port", "99999")
    assert code == 2 and "99999 is too large" in said
    code, said = run("--model", "m", "--prot", "1")
    assert code == 2 and "Did you mean --port" in said


def test_a_port_in_use(fake_server: LiveServer) -> None:
    port = fake_server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "kvasir", "serve", "m", "--host", "127.0.0.1", "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=web.PATIENCE)
    assert ran.returncode == 2 and f"Cannot listen on 127.0.0.1:{port}" in ran.stderr.splitlines()[-1]


# ---------------------------------------------------------------- the end


def unhurried(config: Any) -> Any:
    """An executor that takes half a second for a step until the file that KVASIR_TEST_GATE names is there."""
    from kvasir.executor.fake import DelayExecutor

    gate = Path(os.environ["KVASIR_TEST_GATE"])

    class Unhurried(DelayExecutor):
        def execute(self, plan: Any) -> None:
            self.delay = 0.0 if gate.exists() else 0.5
            super().execute(plan)

    return Unhurried(config.cache.block_size, token=42)


def test_sigterm_lets_accepted_requests_finish(starter_model: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def go(server: LiveServer) -> list[httpx.Response]:
        asked = [asyncio.create_task(ask(server.url, max_tokens=150, stream=i % 2 == 0)) for i in range(40)]
        await running(server, 40)
        server.process.send_signal(signal.SIGTERM)
        await draining(server)  # it still answers, and says so
        late = await ask(server.url, max_tokens=1)
        assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        assert late.headers["retry-after"]
        gate.touch()
        return list(await asyncio.gather(*asked))

    executor, environment = "tests.e2e.test_lifecycle:unhurried", {"KVASIR_TEST_GATE": str(gate)}
    with LiveServer.fake(starter_model, executor=executor, environment=environment) as server:
        replies = asyncio.run(go(server.wait_until_ready()))
        for i, reply in enumerate(replies):
            assert reply.status_code == 200
            if i % 2 == 0:
                assert events(reply.text)[-1]["choices"][0]["finish_reason"] == "length"
            else:
                assert reply.json()["usage"]["completion_tokens"] == 150
        assert server.wait() == 0


@pytest.mark.slow
def test_the_drain_has_a_limit(starter_model: Path) -> None:
    async def go(server: LiveServer) -> list[httpx.Response]:
        asked = [asyncio.create_task(ask(server.url, max_tokens=1900, stream=stream)) for stream in (True, False)]
        await running(server, 2)
        server.process.send_signal(signal.SIGTERM)
        return list(await asyncio.gather(*asked))

    with LiveServer.fake(starter_model, executor=SLOW, server={"shutdown_timeout": 0.5}) as server:
        streamed, whole = asyncio.run(go(server.wait_until_ready()))
        until(lambda: server.log.count("ended: draining") == 2, "both are logged as what they were", server)
        assert events(streamed.text)[-1]["error"]["message"].startswith("The server was shut down")
        assert whole.status_code == 503
        assert server.wait() == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(starter_model: Path) -> None:
    async def go(server: LiveServer) -> list[httpx.Response]:
        asked = [asyncio.create_task(ask(server.url, max_tokens=1900, stream=stream)) for stream in (True, False)]
        await running(server, 2)
        server.process.send_signal(signal.SIGINT)
        await draining(server)
        assert not any(task.done() for task in asked), "the first one lets them finish"
        server.process.send_signal(signal.SIGINT)
        return list(await asyncio.gather(*asked))

    with LiveServer.fake(starter_model, executor=SLOW, server={"shutdown_timeout": 1000.0}) as server:
        streamed, whole = asyncio.run(go(server.wait_until_ready()))
        assert events(streamed.text)[-1]["error"]["message"].startswith("The server was shut down")
        assert whole.status_code == 503
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_a_killed_engine_ends_every_request(starter_model: Path) -> None:
    async def go(server: LiveServer) -> tuple[list[httpx.Response], str]:
        asked = [asyncio.create_task(ask(server.url, max_tokens=1900, stream=i % 2 == 0)) for i in range(40)]
        await running(server, 40)
        body = {**CHAT, "max_tokens": 1900, "stream": True}
        async with (
            httpx.AsyncClient(timeout=web.PATIENCE) as client,
            client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)  # this one has begun; of the others we cannot know
            os.kill(server.engine_pid(), signal.SIGKILL)
            rest = "\n".join([line async for line in lines])
            return list(await asyncio.gather(*asked)), rest

    with LiveServer.fake(starter_model, executor=SLOW) as server:
        replies, rest = asyncio.run(go(server.wait_until_ready()))
        assert "SIGKILL" in events(rest)[-1]["error"]["message"], "an error in a stream that has begun is an event"
        for i, reply in enumerate(replies):
            begun = i % 2 == 0 and reply.status_code == 200
            error = (events(reply.text)[-1] if begun else reply.json())["error"]
            assert "SIGKILL" in error["message"], error
            assert begun or reply.status_code == 503
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
        assert last.startswith("kvasir: error: ") and "SIGKILL" in last


# ---------------------------------------------------------------- an engine that hangs


def stuck(config: Any) -> Any:
    """An executor that hangs in the step after KVASIR_TEST_GATE appears, until it is gone."""
    from kvasir.executor.fake import EchoExecutor

    gate = Path(os.environ["KVASIR_TEST_GATE"])

    class Stuck(EchoExecutor):
        def sample(self, inputs: Any = None) -> Any:
            while gate.exists():
                time.sleep(0.01)
            return super().sample()

    return Stuck(config.cache.block_size, config.scheduler.max_num_seqs, config.model.max_model_len, 49152)


@pytest.mark.slow
def test_ready_notices_an_engine_that_hangs(starter_model: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = LiveServer.fake(
        starter_model,
        engine={"stall_timeout": 0.3},
        executor="tests.e2e.test_lifecycle:stuck",
        environment={"KVASIR_TEST_GATE": str(gate)},
    )

    def status() -> tuple[int, str]:
        reply = web.get(f"{server.url}/ready")
        return reply.status_code, reply.json()["status"]

    async def go() -> None:
        gate.touch()
        asked = asyncio.create_task(ask(server.url, max_tokens=5))
        await asyncio.to_thread(until, lambda: status() == (503, "stalled"), "it is said to hang", server)
        assert (await asyncio.to_thread(web.get, f"{server.url}/health")).status_code == 200
        gate.unlink()
        assert (await asked).status_code == 200

    with server:
        server.wait_until_ready()
        asyncio.run(go())
        until(lambda: status() == (200, "ready"), "it is ready again", server)


# ---------------------------------------------------------------- clients that leave


def held(config: Any) -> Any:
    """An executor of slow steps that begins none while KVASIR_TEST_GATE is there, and notes those after that."""
    from kvasir.executor.fake import DelayExecutor

    gate = Path(os.environ["KVASIR_TEST_GATE"])
    notes = gate.with_suffix(".steps")

    class Held(DelayExecutor):
        def execute(self, plan: Any) -> None:
            while gate.exists():
                notes.touch()
                time.sleep(0.01)
            if notes.exists():
                notes.write_text(notes.read_text() + "x")
            super().execute(plan)

    return Held(config.cache.block_size, 0.5, token=42)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(
    starter_model: Path, tmp_path: Path, stream: bool
) -> None:
    """Steps wait until the server knows that its clients have left, so that steps count, not milliseconds."""
    gate, notes = tmp_path / "gate", tmp_path / "gate.steps"

    async def go(server: LiveServer) -> None:
        asked = [asyncio.create_task(ask(server.url, max_tokens=1900, stream=stream)) for _ in range(5)]
        await running(server, 5)
        gate.touch()
        await asyncio.to_thread(until, notes.exists, "a step waits", server)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await asyncio.to_thread(until, lambda: server.log.count(" ended: disconnect") == 5, "they have left", server)
        gate.unlink()
        await running(server, 0)

    executor, environment = "tests.e2e.test_lifecycle:held", {"KVASIR_TEST_GATE": str(gate)}
    with LiveServer.fake(starter_model, executor=executor, environment=environment) as server:
        asyncio.run(go(server.wait_until_ready()))
        assert len(notes.read_text()) <= 2
        until(lambda: server.metric("kvasir:kv_cache_blocks_used") == 0, "their blocks are free")
        until(lambda: server.metric("kvasir:api_requests_in_flight") == 0, "they are gone from the server")
        assert server.metric("kvasir:request_errors_total", cause="disconnect") == 5
