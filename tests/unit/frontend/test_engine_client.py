"""What a client keeps of requests that it has sent, over connections that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvasir.engine import transport
from kvasir.errors import KvasirError, OverloadedError, RequestError
from kvasir.executor.fake import fake_config
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.messages import EngineOutput, EngineRequest, Extras, Finished, FinishReason, RowSampling
from tests.builders import request


class FakeConnection:
    """Keeps what is sent, and delivers the messages it was given."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.messages: list[tuple[bytes, bytes]] = []

    def send_request(self, request: Any, has_requests: bool) -> None:
        self.sent.append(request)

    def receive(self) -> Iterator[Any]:
        while self.messages:
            yield self.messages.pop(0)

    def num_requests_of_others(self) -> int:
        return 0


@pytest.fixture
def engines() -> EngineClient:
    engines = EngineClient(fake_config(data_parallel_size=2), "", [])
    connections: list[Any] = [FakeConnection(), FakeConnection()]
    engines.connections = connections
    engines.listener = Listener()
    return engines


class Listener:
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_output(self, output: EngineOutput) -> None:
        self.received.append(output)

    def on_refusal(self, key: int, error: KvasirError) -> None:
        self.received.append((key, error))

    def on_death(self, error: KvasirError) -> None:
        self.received.append(error)


def deliver(engines: EngineClient, kind: bytes, data: bytes) -> list[Any]:
    """A message arrives from the first engine. Returns what the listener got."""
    engines.connections[0].messages.append((kind, data))  # type: ignore[attr-defined]
    assert engines.receive() == 1
    assert isinstance(engines.listener, Listener)
    return engines.listener.received


def group(key: int, forks: int) -> EngineRequest:
    parent = request(key, [1, 2, 3])
    return replace(parent, forks=tuple(replace(parent, key=key + 1 + i) for i in range(forks)))


def load(engines: EngineClient) -> int:
    return sum(engine.tokens for engine in engines.router._engines)


def test_with_a_refused_request_its_forks_are_forgotten(engines: EngineClient) -> None:
    engines.add(group(0, forks=3))
    assert engines.num_unfinished == 4 and load(engines) > 0
    refusal = transport.RequestRefusal(0, OverloadedError("full", 1.0))
    ((key, error),) = deliver(engines, transport.REFUSAL, transport.encode_control(refusal))
    assert key == 0 and isinstance(error, OverloadedError)
    assert engines.num_unfinished == load(engines) == len(engines._forks) == 0


def test_forks_outlive_the_request_they_fork_from(engines: EngineClient) -> None:
    engines.add(group(0, forks=2))
    done = EngineOutput.empty()
    done.finished.append(Finished(0, FinishReason.STOP, None, None))
    (output,) = deliver(engines, transport.OUTPUT, transport.encode(done))
    assert output.finished == done.finished
    assert engines.num_unfinished == 2 and not engines._forks


@pytest.mark.parametrize("value", [2**70, object()])
def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(engines: EngineClient, value: Any) -> None:
    odd = RowSampling(extras=Extras(3, forbidden_token_ids=(value,)))
    with pytest.raises(RequestError, match="cannot be sent"):
        engines.add(replace(group(0, forks=1), sampling=odd))
    assert engines.num_unfinished == load(engines) == len(engines._forks) == 0
    engines.add(group(0, forks=1))
    assert engines.num_unfinished == 2
