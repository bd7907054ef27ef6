"""Many clients at once: each gets its own, full text; who leaves leaves nothing behind; who is slow slows nobody."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvasir.frontend.text.tokenizer import Tokenizer
from tests import web
from tests.server_process import LiveServer, echoed, until

CLIENTS = 500
TOKENS = 32


class RawClient:
    """One connection, requests in turn. Bare sockets: 500 of a real client would measure that client."""

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.receive_buffer = receive_buffer

    async def __aenter__(self) -> RawClient:
        sock = socket.socket()
        if self.receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    def send(self, **body: Any) -> None:
        data = json.dumps({"ignore_eos": True, "stream": True, **body}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        self.writer.write(head.encode() + b"\r\n\r\n" + data)

    async def lines(self) -> Any:
        """The data of one stream."""
        while line := await self.reader.readline():
            if line.startswith(b"data: [DONE]"):
                while await self.reader.readline() != b"0\r\n":
                    pass
                await self.reader.readline()
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        raise AssertionError("the connection was closed")

    async def text(self, **body: Any) -> str:
        self.send(**body)
        return "".join([chunk["choices"][0]["text"] async for chunk in self.lines()])


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """A prompt for each client, and the text that the fake engine must give it."""
    texts = [f"This is client number {i} of many." for i in range(CLIENTS)]
    return [(text, echoed(tokenizer, tokenizer.encode(text), TOKENS)) for text in texts]


@pytest.fixture(scope="module")
def server(starter_model: Path) -> Iterator[LiveServer]:
    with LiveServer.fake(
        starter_model,
        engine={"num_gpu_blocks_override": 4096},  # few, so that the prefix cache is soon as large as it gets
        environment={"KVASIR_LOG_LEVEL": "WARNING"},
    ) as found:
        found._url = (
            f"http://127.0.0.1:{until(lambda: port_of(found.process.pid), 'a port', found)}"  # its log does not tell
        )
        yield found.wait_until_ready()


def port_of(pid: int) -> int | None:
    """Where a process listens, if it does yet."""
    found = psutil.Process(pid).net_connections("tcp4")
    return next((each.laddr.port for each in found if each.status == psutil.CONN_LISTEN), None)


async def round_of(url: str, prompts: list[tuple[str, str]], rng: random.Random, aborts: bool) -> int:
    """All clients at once; half of them may leave somewhere on the way. Returns how many texts were right."""

    async def one(prompt: str, expected: str, leaves: bool) -> int:
        async with RawClient(url) as client:
            if not leaves:
                text = await client.text(prompt=prompt, max_tokens=TOKENS)
                assert text == expected, f"{prompt}: {text!r} is not {expected!r}"
                return 1
            client.send(prompt=prompt, max_tokens=2000)
            after, seen = rng.randrange(6), 0
            async for _ in client.lines():
                seen += 1
                if seen > after:
                    return 0
            return 0

    leaving = [aborts and i % 2 == 0 for i in range(len(prompts))]
    pairs = zip(prompts, leaving, strict=True)
    return sum(await asyncio.gather(*(one(prompt, text, leaves) for (prompt, text), leaves in pairs)))


def check_nothing_is_left(server: LiveServer) -> None:
    until(lambda: server.metric("kvasir:api_requests_in_flight") == 0, "no request is left in the server")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used"):
        until(lambda name=name: server.metric(f"kvasir:{name}") == 0, f"{name} in the engine")


def memory(server: LiveServer) -> list[int]:
    """Of the API's and of the engine's process."""
    return [psutil.Process(pid).memory_info().rss for pid in (server.process.pid, server.engine_pid())]


def check_memory(before: list[int], after: list[int]) -> None:
    for old, new in zip(before, after, strict=True):
        assert new < old * 1.05, f"{before} -> {after}"


def test_500_clients_each_get_their_own_text(server: LiveServer, prompts: list[tuple[str, str]]) -> None:
    assert asyncio.run(round_of(server.url, prompts, random.Random(0), aborts=False)) == CLIENTS
    check_nothing_is_left(server)


def test_half_of_them_leave(server: LiveServer, prompts: list[tuple[str, str]]) -> None:
    assert asyncio.run(round_of(server.url, prompts, random.Random(1), aborts=True)) == CLIENTS // 2
    check_nothing_is_left(server)


@pytest.mark.slow
def test_a_slow_reader_slows_nobody(server: LiveServer, prompts: list[tuple[str, str]], tokenizer: Tokenizer) -> None:
    """One that reads nothing until the engine has long been done with its texts, and then reads them all."""
    many, text = 600, "word " * 1900  # more, echoed, than the buffers between the two hold

    async def go() -> None:
        async with RawClient(server.url, receive_buffer=4096) as slow, RawClient(server.url) as quick:
            slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
            generated = server.metric("kvasir:generation_tokens_total")
            slow.send(prompt=[text] * many, max_tokens=2, echo=True)
            await asyncio.to_thread(
                until, lambda: server.metric("kvasir:generation_tokens_total") > generated, "it runs"
            )
            for prompt, expected in prompts[:20]:
                assert await asyncio.wait_for(quick.text(prompt=prompt, max_tokens=TOKENS), web.PATIENCE) == expected
            await asyncio.to_thread(
                until, lambda: server.metric("kvasir:num_requests_running") == 0, "all is generated"
            )
            assert server.metric("kvasir:api_requests_in_flight") == 1, "and waits for its reader"
            slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
            texts = [""] * many
            async for chunk in slow.lines():
                choice = chunk["choices"][0]
                texts[choice["index"]] += choice["text"]
            assert set(texts) == {text + echoed(tokenizer, tokenizer.encode(text), 2)}, "and it misses nothing"

    asyncio.run(go())


@pytest.mark.slow
def test_a_minute_of_500_clients(server: LiveServer, prompts: list[tuple[str, str]]) -> None:
    """Memory of both processes after it is within 5% of what it was after warming up."""
    rng = random.Random(2)
    before = memory(server)
    for warm_up in range(6):  # until tables, caches and the allocator's arenas are as large as this load makes them
        for number in range(10):
            asyncio.run(round_of(server.url, prompts, rng, aborts=number % 2 == 1))
        check_nothing_is_left(server)
        last, before = before, memory(server)
        if warm_up and all(new < old * 1.01 for old, new in zip(last, before, strict=True)):
            break
    end, rounds = time.monotonic() + 60, 0
    while time.monotonic() < end:
        aborts = rounds % 2 == 1
        right = asyncio.run(round_of(server.url, prompts, rng, aborts))
        assert right == (CLIENTS // 2 if aborts else CLIENTS)
        rounds += 1
    check_nothing_is_left(server)
    check_memory(before, memory(server))
