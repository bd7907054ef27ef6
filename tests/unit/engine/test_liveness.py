"""Clients that connect and end at awkward moments, with the thread's checks made one at a time."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from kvasir.engine.liveness import Address, ClientLiveness, make_directory, remove_directory
from kvasir.engine.service import EngineService
from kvasir.engine.transport import Progress
from kvasir.sampling.startup_processors import StartupProcessors
from tests.builders import make_core


class World:
    """ClientLiveness whose thread is not started, and its owner's end."""

    def __init__(self) -> None:
        self.directory = make_directory(1)
        self.address = Address(self.directory, 0)
        ours, theirs = socket.socketpair()
        self.owner = Connection(theirs.detach())
        self.liveness = ClientLiveness(Connection(ours.detach()), os.getppid(), self.address)
        config: Any = "the settings"
        self.liveness.config = config

    def register(self, message: Any, leaves: bool = False) -> Any:
        """A client connects, sends this and perhaps ends at once; then the thread checks its sockets twice."""
        client = Client(self.address.liveness, "AF_UNIX")
        if isinstance(message, bytes):
            client.send_bytes(message)
        else:
            client.send(message)
        if leaves:
            client.close()
        self.liveness.check_sockets()  # it is connected
        self.liveness.check_sockets()  # it has sent its number
        return client


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.owner.close()
    remove_directory(world.directory, 1)


def test_a_client_that_ends_before_it_is_registered_does_no_harm(world: World) -> None:
    world.register(None, leaves=True)
    assert list(world.liveness.clients) == [0]
    number = world.register(None).recv().client
    assert set(world.liveness.clients) == {0, number}
    world.owner.close()
    world.liveness.check_sockets()
    assert world.liveness.owner_ended


@pytest.mark.parametrize("message", [b"no pickle", ["no", "number"]])
def test_a_client_with_an_invalid_first_message_is_not_registered(world: World, message: Any) -> None:
    client = world.register(message)
    assert list(world.liveness.clients) == [0]
    with pytest.raises(EOFError):
        client.recv()
    world.register(None).recv()


def test_a_wake_up_for_a_change_already_handled_is_cleared(world: World) -> None:
    liveness, progress = world.liveness, Progress(world.address.progress, create=True)
    service = EngineService(make_core(), StartupProcessors(None), world.address.messages, liveness, progress)
    liveness.departed.append(1)  # the thread has recorded that a client has ended ...
    service._receive()  # ... the loop, which was busy, handles it ...
    liveness._wake_loop()  # ... before it is woken up
    service.run_once()
    assert not select.select([liveness.wake], [], [], 0)[0]
    service.close()
