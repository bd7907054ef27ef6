"""Clients that come and leave at awkward moments, one look of the thread at a time."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from kvasir.engine.liveness import Lifelines
from kvasir.engine.service import Service
from kvasir.engine.transport import Address, Progress, make_directory, remove_directory
from kvasir.sampling.startup_processors import StartupProcessors
from tests.builders import make_core


class World:
    """Lifelines whose thread is not started, and its owner's end."""

    def __init__(self) -> None:
        self.directory = make_directory(1)
        self.address = Address(self.directory, 0)
        ours, theirs = socket.socketpair()
        self.owner = Connection(theirs.detach())
        self.lifelines = Lifelines(Connection(ours.detach()), os.getppid(), self.address)
        config: Any = "the settings"
        self.lifelines.config = config

    def introduce(self, word: Any, leaves: bool = False) -> Any:
        """A client connects, says this and perhaps leaves at once; then the thread looks twice."""
        client = Client(self.address.lifeline, "AF_UNIX")
        if isinstance(word, bytes):
            client.send_bytes(word)
        else:
            client.send(word)
        if leaves:
            client.close()
        self.lifelines._look()  # it is connected
        self.lifelines._look()  # it has said who it is
        return client


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.owner.close()
    remove_directory(world.directory, 1)


def test_a_client_that_leaves_before_it_is_answered_does_no_harm(world: World) -> None:
    world.introduce(None, leaves=True)
    assert list(world.lifelines.clients) == [0]
    number, *_ = world.introduce(None).recv()
    assert set(world.lifelines.clients) == {0, number}
    world.owner.close()
    world.lifelines._look()
    assert world.lifelines.over


@pytest.mark.parametrize("word", [b"no pickle", ["no", "number"]])
def test_a_client_that_talks_nonsense_is_not_let_in(world: World, word: Any) -> None:
    client = world.introduce(word)
    assert list(world.lifelines.clients) == [0]
    with pytest.raises(EOFError):
        client.recv()
    world.introduce(None).recv()


def test_a_loop_that_was_woken_for_what_it_has_seen_sleeps_again(world: World) -> None:
    lifelines, progress = world.lifelines, Progress(world.address.progress, create=True)
    service = Service(make_core(), StartupProcessors(None), world.address.messages, lifelines, progress)
    lifelines.gone.append(1)  # the thread has noted that a client left ...
    service._receive()  # ... the loop, which was busy, sees it ...
    lifelines._note()  # ... before it is woken
    service.turn()
    assert not select.select([lifelines.wake], [], [], 0)[0]
    service.close()
