"""A long mixed load through two API processes on a fake device: beams, forks, swaps, timeouts and clients that leave.

Every answer that is completed is right, the engine stays the same process, and nothing is left behind. CI runs 100,000
requests, which takes about three minutes; KVASIR_SOAK_REQUESTS sets another number.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import web
from tests.server_process import LiveServer, echoed_ids, metric_in, until

REQUESTS = int(os.environ.get("KVASIR_SOAK_REQUESTS", "100000"))  # sequences, of which an HTTP request may have several
CLIENTS = 48
PROMPTS = 64
ENGINE = {
    "max_num_seqs": 64,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 150,  # few, so that requests are preempted
    "swap_space": 1e-4,
    "preemption_mode": "swap",
    "watermark": 0.0,
}
KEYS = ["alpha", "beta", "gamma"]


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(
        starter_model,
        engine=ENGINE,
        server={"api_server_count": 2, "port": unused_port(), "api_key": KEYS, "shutdown_timeout": 5.0},
        executor="tests.scoring_echo:scoring_echo",
    ) as found:
        yield found.wait_until_ready()


def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Connection:
    """A client's connection, which it opens again after it has left."""

    def __init__(self, url: str, key: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address, self.key = (host, int(port)), key
        self.writer: asyncio.StreamWriter | None = None

    async def wait_until_ready(self) -> None:
        """Wait for the process at the other end; the other one may have been ready before."""
        await self.send({}, "GET /ready")
        while (await self.answer())[0] != 200:
            await asyncio.sleep(0.1)
            await self.send({}, "GET /ready")

    async def send(self, body: dict[str, Any], what: str = "POST /v1/completions") -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(*self.address)
        data = json.dumps(body).encode()
        head = f"{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def answer(self) -> tuple[int, Any]:
        """Status and body of an answer that is not streamed."""
        status, length = int((await self.reader.readline()).split()[1]), 0
        while (line := await self.reader.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(await self.reader.readexactly(length))

    async def events(self) -> Any:
        """The chunks of a streamed answer."""
        while line := await self.reader.readline():
            if line.startswith(b"data: [DONE]"):
                while await self.reader.readline() != b"0\r\n":
                    pass
                await self.reader.readline()
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        raise AssertionError("the server closed the connection")

    def leave(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class Soak:
    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.rng = random.Random(5)
        self.done: Counter[str] = Counter()
        self.left = REQUESTS
        self.prompts = [[self.rng.randrange(2, 9000) for _ in range(self.rng.randrange(1, 60))] for _ in range(PROMPTS)]
        self.texts = [echoed_ids(prompt, 40) for prompt in self.prompts]

    async def run(self) -> None:
        connections = [Connection(self.server.url, KEYS[number % len(KEYS)]) for number in range(CLIENTS)]
        await asyncio.gather(*(each.wait_until_ready() for each in connections))
        await asyncio.gather(*(self.client(*each) for each in enumerate(connections)))

    async def client(self, number: int, connection: Connection) -> None:
        searches = [self.beams] * 3 + [self.leaves_beams]
        others = [self.plain] * 6 + [self.streams] * 4 + [self.forks] * 3 + [self.leaves] * 2 + [self.times_out]
        while self.left > 0:
            quiet = self.left % 2000 < 200  # few clients, and searches of one of them, so that often no search is left
            if quiet and number >= 8:
                await asyncio.sleep(0.02)
                continue
            ways = (searches if number == 0 else [self.streams]) if quiet else searches + others
            await self.rng.choice(ways)(connection)
        connection.leave()

    def body(self, count: int, num_tokens: int, **fields: Any) -> tuple[list[int], dict[str, Any]]:
        which = [self.rng.randrange(PROMPTS) for _ in range(count)]
        self.left -= count * fields.get("n", 1)
        prompts = [self.prompts[i] for i in which]
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        return which, {"prompt": prompts, "max_tokens": num_tokens, **fields}

    def check(self, prompt: int, choice: dict[str, Any], num_tokens: int) -> None:
        assert choice["finish_reason"] == "length" and choice["token_ids"] == self.texts[prompt][:num_tokens], choice

    async def plain(self, connection: Connection) -> None:
        count, num_tokens = self.rng.choice([1, 8, 32]), self.rng.randrange(1, 30)
        which, body = self.body(count, num_tokens)
        await connection.send(body)
        status, answer = await connection.answer()
        assert status == 200, answer
        for choice in answer["choices"]:
            self.check(which[choice["index"]], choice, num_tokens)
        self.done["plain"] += count

    async def streams(self, connection: Connection) -> None:
        num_tokens = self.rng.randrange(1, 30)
        which, body = self.body(4, num_tokens, stream=True)
        await connection.send(body)
        said: dict[int, list[int]] = {index: [] for index in range(4)}
        async for chunk in connection.events():
            for choice in chunk["choices"]:
                said[choice["index"]] += choice.get("token_ids") or []
        assert all(said[i] == self.texts[prompt][:num_tokens] for i, prompt in enumerate(which)), said
        self.done["streams"] += 4

    async def forks(self, connection: Connection) -> None:
        num_tokens, n = self.rng.randrange(2, 20), self.rng.choice([2, 4])
        which, body = self.body(2, num_tokens, n=n, temperature=1.0)  # the fake device ignores temperature
        await connection.send(body)
        status, answer = await connection.answer()
        assert status == 200 and len(answer["choices"]) == 2 * n, answer
        for choice in answer["choices"]:
            self.check(which[choice["index"] // n], choice, num_tokens)
        self.done["forks"] += 2 * n

    async def beams(self, connection: Connection) -> None:
        num_tokens = self.rng.choice([4, 20, 190])
        _, body = self.body(1, num_tokens, n=self.rng.choice([2, 4]), use_beam_search=True)
        if num_tokens > 20 or self.rng.random() < 0.5:
            body["timeout"] = self.rng.choice([0.02, 0.1, 0.3])
        await connection.send(body)
        status, answer = await connection.answer()
        assert status == 200 or (status == 504 and "timeout" in body), answer
        self.done["beams" if status == 200 else "beams that time out"] += body["n"]

    async def leaves(self, connection: Connection) -> None:
        _, body = self.body(self.rng.choice([1, 4]), 190, stream=True, n=self.rng.choice([1, 2]), temperature=1.0)
        await connection.send(body)
        seen = self.rng.randrange(1, 12)
        async for _ in connection.events():
            seen -= 1
            if not seen:
                break
        connection.leave()
        self.done["leave"] += 1

    async def leaves_beams(self, connection: Connection) -> None:
        _, body = self.body(1, 150, n=4, use_beam_search=True)
        await connection.send(body)
        await asyncio.sleep(self.rng.random() * 0.2)
        connection.leave()
        self.done["beams that leave"] += 1

    async def times_out(self, connection: Connection) -> None:
        _, body = self.body(2, 190, timeout=self.rng.choice([0.01, 0.1]))
        await connection.send(body)
        status, answer = await connection.answer()
        assert status == 504 or {choice["finish_reason"] for choice in answer["choices"]} <= {"timeout", "length"}, (
            answer
        )
        self.done["time out"] += 2


@pytest.mark.slow
def test_soak(server: LiveServer) -> None:
    engine = psutil.Process(server.engine_pid())
    before = engine.memory_info().rss
    soak = Soak(server)
    limit = 60 + REQUESTS / 100  # seconds; a machine of two cores takes about a fifth

    async def go() -> None:
        await asyncio.wait_for(soak.run(), limit)

    asyncio.run(go())
    assert len(soak.done) == 8 and min(soak.done.values()) > 0
    assert engine.is_running() and server.engine_pid() == engine.pid, "it is the same process"
    for name in ("api_requests_in_flight", "num_requests_running", "num_requests_waiting", "kv_cache_blocks_used"):
        until(lambda name=name: metric(server, name) == 0, f"{name} is 0", server)
    until(lambda: metric(server, "host_cache_blocks_used") == 0, "no host block is kept", server)
    assert metric(server, "num_preemptions_swapped_total") > 0 and metric(server, "kv_blocks_swapped_in_total") > 0
    assert "Traceback" not in server.log
    assert engine.memory_info().rss < 1.3 * before + (32 << 20), "memory does not grow with the number of requests"


def metric(server: LiveServer, name: str) -> float:
    page = web.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    return metric_in(page, f"kvasir:{name}")
