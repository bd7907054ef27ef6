"""What a client remembers of requests it has sent, over links that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvasir.engine import transport
from kvasir.errors import OverloadedError, RequestError
from kvasir.executor.fake import fake_config
from kvasir.frontend.clients.engines import Engines
from kvasir.messages import EngineOutput, EngineRequest, Extras, Finished, FinishReason, RowSampling
from tests.builders import request


class Link:
    """Keeps what is sent, and says what it is told to."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.events: list[Any] = []

    def add(self, request: Any, waits_already: bool) -> None:
        self.sent.append(request)

    def receive(self) -> Iterator[Any]:
        while self.events:
            yield self.events.pop(0)

    def requests_of_others(self) -> int:
        return 0


@pytest.fixture
def engines() -> Engines:
    engines = Engines(fake_config(data_parallel_size=2), "", [])
    links: list[Any] = [Link(), Link()]
    engines.links = links
    return engines


def say(engines: Engines, *events: Any) -> None:
    """One of them says this, and it is heard."""
    engines.links[0].events += events  # type: ignore[attr-defined]
    list(engines.receive())


def family(key: int, forks: int) -> EngineRequest:
    parent = request(key, [1, 2, 3])
    return replace(parent, forks=tuple(replace(parent, key=key + 1 + i) for i in range(forks)))


def load(engines: Engines) -> int:
    return sum(engine.tokens for engine in engines.router._engines)


def test_with_a_refused_request_its_forks_are_forgotten(engines: Engines) -> None:
    engines.add(family(0, forks=3))
    assert engines.num_unfinished == 4 and load(engines) > 0
    say(engines, transport.Refused(0, OverloadedError("full", 1.0)))
    assert engines.num_unfinished == load(engines) == len(engines._forks) == 0


def test_forks_outlive_the_request_they_fork_from(engines: Engines) -> None:
    engines.add(family(0, forks=2))
    done = EngineOutput.empty()
    done.finished.append(Finished(0, FinishReason.STOP, None, None))
    say(engines, done)
    assert engines.num_unfinished == 2 and not engines._forks


@pytest.mark.parametrize("value", [2**70, object()])
def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(engines: Engines, value: Any) -> None:
    odd = RowSampling(extras=Extras(3, forbidden_token_ids=(value,)))
    with pytest.raises(RequestError, match="cannot be sent"):
        engines.add(replace(family(0, forks=1), sampling=odd))
    assert engines.num_unfinished == load(engines) == len(engines._forks) == 0
    engines.add(family(0, forks=1))
    assert engines.num_unfinished == 2
