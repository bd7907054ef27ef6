"""Clients that come and leave at awkward moments, one look of the thread at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from kvasir.engine.lifelines import Lifelines
from kvasir.transport.address import Address, make_directory, remove_directory


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
    number, _ = world.introduce(None).recv()
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
