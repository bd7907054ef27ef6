"""Where an engine is found: files in one directory that only its owner's user may enter. API and core process."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from kvasir.errors import ConfigError

_LONGEST_PATH = 107  # of a socket, by Linux
KEYS_PER_CLIENT = 40  # bits: a client numbers its requests within a range of its own


@dataclass(slots=True, frozen=True)
class Address:
    """One of the engines of a directory, in a folder of its own."""

    directory: str
    index: int

    @property
    def folder(self) -> str:
        return f"{self.directory}/{self.index}"

    @property
    def messages(self) -> str:
        """The ZeroMQ endpoint that requests go to and outputs come from."""
        return f"ipc://{self.folder}/messages"

    @property
    def lifeline(self) -> str:
        """The socket that clients keep open as long as they live."""
        return f"{self.folder}/lifeline"

    @property
    def progress(self) -> str:
        return f"{self.folder}/progress"

    def remove(self) -> None:
        """What belongs to this engine, and the directory with the last one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(self.directory)


def make_directory(num_engines: int) -> str:
    directory = tempfile.mkdtemp(prefix="kvasir-")  # for this user alone
    for index in range(num_engines):
        os.mkdir(Address(directory, index).folder)
    if len(Address(directory, num_engines).lifeline) > _LONGEST_PATH:
        remove_directory(directory, num_engines)
        raise ConfigError(f"the directory for sockets, {directory}, has too long a name; set TMPDIR to a shorter one")
    return directory


def remove_directory(directory: str, num_engines: int) -> None:
    for index in range(num_engines):
        Address(directory, index).remove()


def identity(client: int) -> bytes:
    """A client's name as ZeroMQ knows it."""
    return b"c" + client.to_bytes(4, "big")  # names that begin with a zero are ZeroMQ's own


def client_of(name: bytes) -> int:
    return int.from_bytes(name[1:], "big")
