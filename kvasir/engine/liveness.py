"""How engines and clients meet, and how an engine notices that a client has ended. API and core process.

Both belong to one user and meet in a directory that only this user may enter. Every client, the owner included, keeps a
liveness socket open for as long as it lives; the kernel closes it when the process ends. A thread of the engine process
watches these sockets, and the engine's loop reads what the thread has recorded.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.config.scratch import LOCK, make_scratch, remove_scratch
from kvasir.errors import ConfigError
from kvasir.log import get_logger

logger = get_logger(__name__)
GRACE_SECONDS = 5.0  # how long the engine's loop may take to end after its owner has ended
_CHECK_SECONDS = 1.0  # between two checks of the owner's process id
_MAX_SOCKET_PATH = 107  # bytes, Linux's limit

# ---------------------------------------------------------------- addresses


@dataclass(slots=True, frozen=True)
class Address:
    """The files of one engine: a folder in the directory that its owner made."""

    directory: str
    index: int

    @property
    def folder(self) -> str:
        return f"{self.directory}/{self.index}"

    @property
    def messages(self) -> str:
        """The ZeroMQ endpoint for requests and outputs."""
        return f"ipc://{self.folder}/messages"

    @property
    def liveness(self) -> str:
        """The socket that every client keeps open for as long as it lives."""
        return f"{self.folder}/liveness"

    @property
    def progress(self) -> str:
        """The file behind the memory page of `Progress`."""
        return f"{self.folder}/progress"

    def remove(self) -> None:
        """Remove this engine's folder, and the directory if it was the last one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            if set(os.listdir(self.directory)) <= {LOCK}:
                remove_scratch(self.directory)


def make_directory(num_engines: int) -> str:
    directory = make_scratch()
    for index in range(num_engines):
        os.mkdir(Address(directory, index).folder)
    if len(Address(directory, num_engines).liveness) > _MAX_SOCKET_PATH:
        remove_directory(directory, num_engines)
        raise ConfigError(f"the directory for sockets, {directory}, has too long a path; set TMPDIR to a shorter one")
    return directory


def remove_directory(directory: str, num_engines: int) -> None:
    for index in range(num_engines):
        Address(directory, index).remove()
    remove_scratch(directory)


# ---------------------------------------------------------------- messages on the liveness socket

# From a starting engine, as (kind, value).
RESOLVED, READY, FAILED = "resolved", "ready", "failed"  # EngineConfig, startup seconds by phase, KvasirError


@dataclass(slots=True)
class EngineStart:
    """The first message to a new engine process."""

    asked: EngineConfig  # not resolved yet
    executor: str | Callable[[EngineConfig], Any] | None  # replaces the model's: "module:name" or a picklable callable
    directory: str
    index: int  # of this engine in the directory
    owner: int  # process id


@dataclass(slots=True)
class Registration:
    """An engine's reply to a client that connects to its liveness socket."""

    client: int  # the client's number
    config: EngineConfig
    startup_seconds: dict[str, float]  # by startup phase


# ---------------------------------------------------------------- the engine's side


class ClientLiveness(threading.Thread):
    """Notices when clients connect or end, and ends the engine when its owner ends."""

    def __init__(self, owner: Connection, owner_pid: int, address: Address) -> None:
        super().__init__(daemon=True, name="client-liveness")
        self.config: EngineConfig | None = None  # clients are registered only once it is known
        self.startup_seconds: dict[str, float] = {}  # by startup phase
        self.owner_ended = False  # or has closed its socket, which asks the engine to end
        self.departed: deque[int] = deque()  # numbers of clients that have ended
        self.clients: dict[int, Connection] = {0: owner}  # by number; the owner is client 0
        self.grace_seconds = 0.0  # GRACE_SECONDS once the engine's loop runs
        self._owner, self._owner_pid = owner, owner_pid
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address.liveness)
        self._listener.listen()
        self._new: list[Connection] = []  # connected, not registered yet
        self._next_number = 1
        self.wake, self._waker = socket.socketpair()  # readable when something was recorded
        self.wake.setblocking(False)

    def run(self) -> None:
        while True:
            try:
                self.check_sockets()
            except Exception:  # without this thread the engine could outlive its owner
                logger.exception("Checking the clients' sockets failed; trying again")
                time.sleep(_CHECK_SECONDS)
            if self.owner_ended or os.getppid() != self._owner_pid:
                self._end()

    def check_sockets(self) -> None:
        """Wait a moment for a socket to change, and handle every change."""
        sockets: list[Connection | socket.socket] = [self._listener, *self._new, *self.clients.values()]
        for ready in wait(sockets, _CHECK_SECONDS):
            if not isinstance(ready, Connection):
                self._new.append(Connection(self._listener.accept()[0].detach()))
            elif ready in self._new:
                self._register(ready)
            else:
                self._check_closed(ready)

    def broadcast(self, message: Any) -> None:
        for client in list(self.clients.values()):
            with suppress(OSError):
                client.send(message)

    def clear_wake(self) -> None:
        """Make `wake` unreadable until something new is recorded. Call it before reading the records, not after."""
        with suppress(BlockingIOError):
            self.wake.recv(4096)

    def take_departed(self) -> list[int]:
        """Numbers of clients that have ended since the last call."""
        self.clear_wake()
        return [self.departed.popleft() for _ in range(len(self.departed))]

    # ------------------------------------------------------------ on the thread

    def _register(self, client: Connection) -> None:
        """The client sends the number that another engine of this owner gave it, or None to get one."""
        self._new.remove(client)
        if self.config is None:
            client.close()
            return
        try:
            number = client.recv()
            if number is None:
                number, self._next_number = self._next_number, self._next_number + 1
            self.clients[number] = client  # before the reply: its first request may follow at once
            client.send(Registration(number, self.config, self.startup_seconds))
        except (EOFError, OSError):
            self._remove(client)
        except Exception:
            logger.exception("A client could not be registered: its first message is invalid")
            self._remove(client)

    def _check_closed(self, client: Connection) -> None:
        """Registered clients send nothing, so a readable socket has been closed."""
        with suppress(EOFError, OSError):
            client.recv()
            return
        if client is self._owner:
            self.owner_ended = True
            return
        self.departed += self._remove(client)
        self._wake_loop()

    def _remove(self, client: Connection) -> list[int]:
        """Close the socket. Returns the number of the client in a list, or nothing if it was not registered."""
        numbers = [number for number, other in self.clients.items() if other is client]
        for number in numbers:
            del self.clients[number]
        client.close()
        return numbers

    def _wake_loop(self) -> None:
        self._waker.send(b".")

    def _end(self) -> None:
        """Let the engine's loop end. If it hangs, end the process; its workers notice that and end too."""
        self.owner_ended = True
        self._wake_loop()
        time.sleep(self.grace_seconds)
        self._address.remove()
        os._exit(1)
