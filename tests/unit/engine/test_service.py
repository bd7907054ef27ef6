"""The loop of an engine process over real sockets, with a fake core: which client gets which message."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from kvasir.engine import transport
from kvasir.engine.liveness import Address, make_directory
from kvasir.engine.service import EngineService, split
from kvasir.engine.transport import KEYS_PER_CLIENT, Progress, identity
from kvasir.errors import EngineError, OverloadedError, RequestError
from kvasir.messages import LOGPROBS, PROMPT_LOGPROBS, EngineOutput, EngineRequest, Finished, FinishReason, Part
from kvasir.sampling.startup_processors import StartupProcessors


class ListCore:
    """Takes requests, or raises what it is told to, and gives out what it is told to."""

    def __init__(self) -> None:
        self.scheduler: list[int] = []
        self.errors: deque[Exception] = deque()
        self.outputs: deque[EngineOutput] = deque()
        self.aborted: list[int] = []
        self.waits: deque[float] = deque()

    def add(self, request: EngineRequest) -> None:
        if self.errors:
            raise self.errors.popleft()
        self.scheduler.append(request.key)

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        self.aborted.append(key)
        return True

    def has_work(self) -> bool:
        return bool(self.outputs)

    def seconds_to_wait(self) -> float:
        return self.waits.popleft() if self.waits else 0.0

    def run_step(self) -> EngineOutput:
        return self.outputs.popleft()


class World:
    """A service, and clients by number."""

    def __init__(self, *clients: int) -> None:
        self.core: Any = ListCore()
        self.directory = make_directory(1)
        self.address = Address(self.directory, 0)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self.liveness: Any = SimpleNamespace(
            owner_ended=False,
            departed=deque(),
            clients=dict.fromkeys(clients),
            wake=self._wake,
            clear_wake=lambda: None,
            take_departed=self._take_departed,
        )
        progress = Progress(self.address.progress, create=True)
        self.service = EngineService(self.core, StartupProcessors(None), self.address.messages, self.liveness, progress)
        self.context = zmq.Context()
        self.clients = {number: self._connect(number) for number in clients}

    def _take_departed(self) -> list[int]:
        return [self.liveness.departed.popleft() for _ in range(len(self.liveness.departed))]

    def _connect(self, number: int) -> zmq.Socket[bytes]:
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.IDENTITY, identity(number))
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 10_000)
        client.connect(self.address.messages)
        return client

    def send(self, client: int, kind: bytes, data: bytes) -> None:
        self.clients[client].send_multipart([kind, data])
        self.service.run_once()

    def add(self, client: int, key: int) -> None:
        self.send(client, transport.ADD, transport.encode(request(client, key)))

    def receive(self, client: int) -> Any:
        kind, data = self.clients[client].recv_multipart()
        return transport.decode_output(data) if kind == transport.OUTPUT else transport.decode_control(data)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.context.term()
        self.service.close()
        self._wake.close()
        self._waker.close()
        self.address.remove()


@pytest.fixture
def world() -> Iterator[World]:
    world = World(0, 1, 2)
    yield world
    world.close()


def number(client: int, key: int) -> int:
    return (client << KEYS_PER_CLIENT) + key


def request(client: int, key: int) -> EngineRequest:
    return EngineRequest(number(client, key), np.array([1, 2], np.int32), 8)


def test_errors_of_add_come_back_as_they_are(world: World) -> None:
    world.core.errors.extend(
        [OverloadedError("full", retry_after=7.0), RequestError("no", "prompt"), KeyError("a bug\nof ours")]
    )
    for key in range(4):
        world.add(1, key)
    overloaded, wrong, bug = (world.receive(1) for _ in range(3))
    assert type(overloaded.error) is OverloadedError and overloaded.error.retry_after == 7.0
    assert type(wrong.error) is RequestError and wrong.error.parameter == "prompt"
    assert type(bug.error) is EngineError and "KeyError" in str(bug.error) and "\n" not in str(bug.error)
    assert [refused.key for refused in (overloaded, wrong, bug)] == [number(1, key) for key in range(3)]
    assert world.core.scheduler == [number(1, 3)], "the engine goes on"


def test_what_cannot_be_read_is_answered_where_there_is_a_key(world: World) -> None:
    world.send(0, transport.ADD, transport.encode({"key": 5, "prompt_token_ids": "no array"}))
    refused = world.receive(0)
    assert refused.key == 5 and isinstance(refused.error, EngineError)
    world.send(0, transport.ADD, b"\xc1")
    world.send(0, transport.ADD, transport.encode(request(1, 9)))
    assert world.receive(0).key == number(1, 9), "another client's range of keys is not to be used"
    world.add(0, 1)
    assert world.core.scheduler == [1]


def test_outputs_go_to_those_who_asked(world: World) -> None:
    world.add(1, 7)
    world.add(2, 7)
    keys = np.array([number(2, 7), number(1, 7)])
    world.core.outputs.append(EngineOutput(keys, np.array([[20], [10]], np.int32), np.ones(2, np.int32)))
    world.service.run_once()
    for client, token in ((1, 10), (2, 20)):
        output = world.receive(client)
        assert output.keys.tolist() == [number(client, 7)] and output.token_ids.tolist() == [[token]]


def test_a_client_that_leaves_has_its_requests_aborted(world: World) -> None:
    for client, key in itertools.product((0, 1), range(3)):
        world.add(client, key)
    ended = Finished(number(1, 0), FinishReason.STOP, None, None)
    world.core.outputs.append(EngineOutput.empty())
    world.core.outputs[-1].finished.append(ended)
    world.service.run_once()
    del world.liveness.clients[1]
    world.liveness.departed.append(1)
    world.add(1, 9)  # sent before it left, read after
    assert sorted(world.core.aborted) == [number(1, 1), number(1, 2)], "those that run, and of this client alone"
    assert number(1, 9) not in world.core.scheduler


def test_aborts_and_questions(world: World) -> None:
    world.send(0, transport.ABORT, transport.encode([(3, None), (4, 2)]))
    assert world.core.aborted == [3, 4]
    world.send(0, transport.CALL, transport.encode_control(transport.CoreCall(11, "has_work", ())))
    answer = world.receive(0)
    assert answer.number == 11 and answer.value is False and answer.error is None
    world.send(0, transport.CALL, transport.encode_control(transport.CoreCall(12, "abort", (1, 2, 3))))
    assert "TypeError" in str(world.receive(0).error)
    world.core.generator = lambda: (x for x in ())
    world.send(0, transport.CALL, transport.encode_control(transport.CoreCall(13, "generator", ())))
    answer = world.receive(0)
    assert answer.number == 13 and "cannot" in str(answer.error), "an answer that cannot be sent is said to be one"
    world.send(0, transport.CALL, b"nonsense")
    world.send(0, transport.CALL, transport.encode_control(transport.CoreCall(14, "has_work", ())))
    assert world.receive(0).number == 14, "the engine goes on"


def test_a_broken_reply_fails_its_request_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for client in (1, 2):
        for key in (7, 8):
            world.add(client, key)
    keys = [number(2, 7), number(1, 7), number(1, 8), number(2, 8), -3]  # -3: a key that no client has
    output = EngineOutput(np.array(keys), np.arange(5, dtype=np.int32)[:, None], np.ones(5, np.int32))
    broken: Any = object()
    output.finished = [
        Finished(number(1, 8), FinishReason.STOP, broken, None),
        Finished(number(2, 8), FinishReason.STOP, 3, None),
        Finished(-4, FinishReason.STOP, 3, None),
    ]
    world.core.outputs.append(output)
    world.service.run_once()
    assert world.receive(1).keys.tolist() == [number(1, 7)]
    refused = world.receive(1)
    assert refused.key == number(1, 8) and type(refused.error) is EngineError
    assert world.core.aborted == [number(1, 8)], "the engine does not go on with what nobody can get"
    whole = world.receive(2)
    assert whole.keys.tolist() == [number(2, 7), number(2, 8)] and [end.key for end in whole.finished] == [number(2, 8)]
    assert str(number(1, 8)) in caplog.text and "-3" in caplog.text, "the log names the requests"
    world.core.outputs.append(EngineOutput(np.array([number(1, 7)]), np.ones((1, 1), np.int32), np.ones(1, np.int32)))
    world.service.run_once()
    assert world.receive(1).keys.tolist() == [number(1, 7)], "the engine goes on"


def test_split_gives_each_client_its_lines() -> None:
    keys = np.array([number(c, k) for c, k in ((0, 1), (3, 1), (0, 2), (3, 2), (5, 1))])
    logprobs = Part(np.array([1, 2], np.int32), {"token_ids": np.array([[5], [6]], np.int32)})
    prompt = Part(np.array([4], np.int32), floats={"values": np.ones((1, 2), np.float32)})
    output = EngineOutput(
        keys,
        np.arange(5, dtype=np.int32)[:, None],
        np.array([1, 1, 1, 1, 0], np.int32),
        {LOGPROBS: logprobs, PROMPT_LOGPROBS: prompt},
        [Finished(number(3, 2), FinishReason.STOP, None, None)],
    )
    parts = dict(split(output))
    assert sorted(parts) == [0, 3, 5]
    assert parts[0].token_ids.tolist() == [[0], [2]] and parts[3].token_ids.tolist() == [[1], [3]]
    assert parts[0].parts.keys() == parts[3].parts.keys() == {LOGPROBS}
    assert parts[0].parts[LOGPROBS].index.tolist() == [1]
    assert parts[0].parts[LOGPROBS].ints["token_ids"].tolist() == [[6]]
    assert parts[3].parts[LOGPROBS].ints["token_ids"].tolist() == [[5]]
    assert [end.key for end in parts[3].finished] == [number(3, 2)] and not parts[0].finished
    assert parts[5].counts.tolist() == [0] and parts[5].parts[PROMPT_LOGPROBS].floats["values"].tolist() == [[1, 1]]


def test_requests_that_come_while_the_device_computes_are_part_of_the_next_step(world: World) -> None:
    world.core.waits += [5.0, 0.0]
    world.core.outputs.append(EngineOutput.empty())
    added: list[list[int]] = []
    world.core.run_step = lambda: (added.append(list(world.core.scheduler)), world.core.outputs.popleft())[1]
    later = threading.Timer(0.05, world.clients[1].send_multipart, [[transport.ADD, transport.encode(request(1, 5))]])
    later.start()
    world.service.run_once()
    later.join()
    assert len(added) == 1 and len(added[0]) == 1, "the step did not wait for the request"
