"""The load test's HTTP client against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvasir.bench.serve.client import Endpoint, LoadClient, Target, TimedAnswer
from kvasir.errors import ConfigError

EVENTS = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(EVENTS), EVENTS)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(EVENTS), EVENTS)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ask(handler: Handler, count: int = 1) -> tuple[list[TimedAnswer], LoadClient]:
    """One request after the other."""

    async def run() -> tuple[list[TimedAnswer], LoadClient]:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = LoadClient(Target(f"http://127.0.0.1:{port}/v1/completions", {"X-Test": "yes"}))
        answers = [TimedAnswer() for _ in range(count)]
        for answer in answers:
            await asyncio.wait_for(client.ask(b"{}", answer), 30)
        client.close()
        server.close()
        return answers, client

    return asyncio.run(run())


def replies(*parts: bytes, then_close: bool = False) -> Handler:
    """Answers the requests of a connection with these, and closes it when they are used up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"X-Test: yes" in head and b"Content-Length: 2" in head
            await reader.readexactly(2)
            writer.write(part)
        if not then_close:
            await reader.read(1)  # the next request, which nobody answers
        writer.close()

    return handle


def test_connections_are_kept() -> None:
    answers, client = ask(replies(GOOD, CHUNKED, GOOD), 3)
    assert [answer.error for answer in answers] == ["", "", ""] and client.num_opened == 1


def test_a_kept_connection_that_was_closed_is_no_failure() -> None:
    answers, client = ask(replies(GOOD), 3)
    assert [answer.error for answer in answers] == ["", "", ""] and client.num_opened == 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "the connection was closed"),
        (CHUNKED[:-20], "the connection was closed"),
        (b"SMTP ready\r\n\r\n", "the reply is not HTTP"),
        (GOOD.replace(b"200 OK", b"503 Busy"), "HTTP 503"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(reply: bytes, message: str) -> None:
    (answer,), _ = ask(replies(reply, then_close=True))
    assert message in answer.error


def test_nobody_listens() -> None:
    async def run() -> TimedAnswer:
        answer = TimedAnswer()
        await LoadClient(Target("http://127.0.0.1:9/x", {})).ask(b"{}", answer)
        return answer

    assert asyncio.run(run()).error.startswith("no connection: ")
    with pytest.raises(ConfigError, match="is not a URL"):
        Target("localhost:8000", {})
    with pytest.raises(ConfigError, match="localhost:8000 is not a URL"):
        Endpoint("localhost:8000", "/v1/completions", is_chat=False).served(patience=600)
