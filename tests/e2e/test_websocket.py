"""Chat over a WebSocket: the chunks of the event stream, requests in turn, cancelling, errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from tests import web
from tests.server_process import LiveServer, events, until

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10, "ignore_eos": True}
SLOW = {"make": "kvasir.executor.fake:delayed", "delay": 0.01, "token": 42}


@pytest.fixture(scope="module")
def slow_server(starter_model: Path) -> Iterator[LiveServer]:
    """Where a long request runs for many seconds, and bodies have little memory."""
    limits = {"max_request_bytes": 1 << 20, "max_body_memory": 1 << 20}
    with LiveServer.fake(starter_model, executor={**SLOW, "delay": 0.05}, server=limits) as server:
        yield server.wait_until_ready()


@pytest.fixture
def slow_socket(slow_server: LiveServer) -> Iterator[ClientConnection]:
    with web.connect(slow_server.ws_url) as connection:
        yield connection


@pytest.fixture
def socket(fake_server: LiveServer) -> Iterator[ClientConnection]:
    with web.connect(fake_server.ws_url) as connection:
        yield connection


def answer(socket: ClientConnection) -> list[Any]:
    found = []
    while (message := socket.recv(web.PATIENCE)) != "[DONE]":
        found.append(json.loads(message))
    return found


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_requests_in_turn_get_the_chunks_of_a_stream(socket: ClientConnection, fake_server: LiveServer) -> None:
    reply = web.post(f"{fake_server.url}/v1/chat/completions", json={**BODY, "stream": True})
    expected = text_of(events(reply.text))
    for _ in range(3):
        socket.send(json.dumps(BODY))
        chunks = answer(socket)
        assert text_of(chunks) == expected
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_request_sent_early_waits_for_its_turn(socket: ClientConnection) -> None:
    socket.send(json.dumps(BODY))
    first = answer(socket)
    socket.send(json.dumps({"type": "cancel"}))  # too late: nothing runs
    socket.send(json.dumps(BODY))
    assert text_of(answer(socket)) == text_of(first)


def test_messages_count_as_bodies_until_they_are_answered(slow_server: LiveServer) -> None:
    large = json.dumps({**BODY, "max_tokens": 1900, "padding": "x" * 600_000})
    with web.connect(slow_server.ws_url) as first:
        first.send(large)
        first.recv(web.PATIENCE)
        with web.connect(slow_server.ws_url) as second:
            second.send(large)
            assert "no memory left for messages" in json.loads(second.recv(web.PATIENCE))["error"]["message"]
            with pytest.raises(ConnectionClosed) as closed:
                second.recv(web.PATIENCE)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        with web.connect(slow_server.ws_url) as third:
            third.send(json.dumps(BODY))
            assert answer(third)[-1]["choices"][0]["finish_reason"] == "length", "small messages have a reserve"
        first.send(json.dumps({"type": "cancel"}))
        answer(first)
        with web.connect(slow_server.ws_url) as fourth:
            fourth.send(json.dumps({**BODY, "padding": "x" * 600_000}))
            answer(fourth)


def test_cancel(slow_socket: ClientConnection, slow_server: LiveServer) -> None:
    socket = slow_socket
    socket.send(json.dumps({**BODY, "max_tokens": 1900}))
    socket.recv(web.PATIENCE)
    socket.send(json.dumps({"type": "cancel"}))
    assert answer(socket)[-1]["choices"][0]["finish_reason"] == "abort"
    socket.send(json.dumps(BODY))
    assert answer(socket)[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: slow_server.metric("kvasir:kv_cache_blocks_used") == 0, "blocks are given back")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({**BODY, "max_tokens": "many"}), "max_tokens"),
        (json.dumps({**BODY, "model": "other"}), "does not exist"),
        (json.dumps({**BODY, "temperature": -5}), "temperature"),
        (json.dumps({**BODY, "stream": False}), "A WebSocket always streams"),
        (b'{"messages": "\xff"}', "it is not UTF-8"),
    ],
)
def test_errors_close_with_4001(socket: ClientConnection, message: str | bytes, said: str) -> None:
    socket.send(message)
    assert said in json.loads(socket.recv(web.PATIENCE))["error"]["message"]
    assert said in reason_of_close(socket)


def reason_of_close(socket: ClientConnection) -> str:
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(web.PATIENCE)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 4001
    return caught.value.rcvd.reason


def test_pages_of_other_origins_may_not_ask(fake_server: LiveServer) -> None:
    with (
        web.connect(fake_server.ws_url, origin="https://evil.example") as socket,
        pytest.raises(ConnectionClosed) as caught,
    ):  # type: ignore[arg-type]
        socket.recv(web.PATIENCE)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 4001
    with web.connect(fake_server.ws_url, origin=fake_server.url) as socket:  # type: ignore[arg-type]
        socket.send(json.dumps(BODY))
        assert answer(socket)


def test_one_request_at_a_time(slow_socket: ClientConnection) -> None:
    slow_socket.send(json.dumps({**BODY, "max_tokens": 1900}))
    slow_socket.send(json.dumps(BODY))
    with pytest.raises(ConnectionClosed) as caught:
        while True:
            slow_socket.recv(web.PATIENCE)
    assert caught.value.rcvd is not None and "A request is running" in caught.value.rcvd.reason


def test_a_closed_socket_aborts(slow_server: LiveServer) -> None:
    generated = slow_server.metric("kvasir:generation_tokens_total")
    with web.connect(slow_server.ws_url) as socket:
        socket.send(json.dumps({**BODY, "max_tokens": 1900}))
        socket.recv(web.PATIENCE)
    until(lambda: slow_server.metric("kvasir:num_requests_running") == 0, "the request is aborted")
    until(lambda: slow_server.metric("kvasir:api_requests_in_flight") == 0, "it is gone from the server")
    assert slow_server.metric("kvasir:generation_tokens_total") - generated < 1900, "before it was done"


# ---------------------------------------------------------------- when the server ends


def test_while_it_drains_only_what_runs_goes_on(starter_model: Path) -> None:
    with (
        LiveServer.fake(starter_model, executor=SLOW) as server,
        web.connect(server.wait_until_ready().ws_url) as runs,
        web.connect(server.ws_url) as idle,
    ):
        runs.send(json.dumps({**BODY, "max_tokens": 1900}))
        runs.recv(web.PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: web.get(f"{server.url}/ready").json()["status"] == "draining", "the drain", server)
        with web.connect(server.ws_url) as late:
            for socket in (idle, late):
                socket.send(json.dumps(BODY))
                assert json.loads(socket.recv(web.PATIENCE))["error"]["code"] == "draining"
                assert "shutting down" in reason_of_close(socket)
        runs.send(json.dumps({"type": "cancel"}))
        assert answer(runs)[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_an_engine_that_dies_is_told_of(starter_model: Path) -> None:
    with (
        LiveServer.fake(starter_model, executor=SLOW) as server,
        web.connect(server.wait_until_ready().ws_url) as socket,
    ):
        socket.send(json.dumps({**BODY, "max_tokens": 1900}))
        socket.recv(web.PATIENCE)
        os.kill(server.engine_pid(), signal.SIGKILL)
        while "error" not in (message := json.loads(socket.recv(web.PATIENCE))):
            pass
        assert message["error"]["code"] == "engine_dead" and "SIGKILL" in message["error"]["message"]
        assert reason_of_close(socket)
        assert server.wait() == 1
