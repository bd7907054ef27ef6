"""Where an engine is found: files in one directory that only its owner's user may enter. API and core process."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from kvasir.errors import ConfigError

_LONGEST_PATH = 107  # of a socket, by Linux
KEYS_PER_CLIENT = 40  # bits: a client numbers its requests within a range of its own


@dataclass(slots=True, frozen=True)
class Address:
    """One of the engines of a directory."""

    directory: str
    index: int

    @property
    def messages(self) -> str:
        """The ZeroMQ endpoint that requests go to and outputs come from."""
        return f"ipc://{self.directory}/{self.index}.zmq"

    @property
    def lifeline(self) -> str:
        """The socket that clients keep open as long as they live."""
        return f"{self.directory}/{self.index}.life"

    @property
    def progress(self) -> str:
        return f"{self.directory}/{self.index}.progress"

    def remove(self) -> None:
        """The files of this engine, and the directory with those of the last one."""
        for path in (self.messages.removeprefix("ipc://"), self.lifeline, self.progress):
            with suppress(OSError):
                os.unlink(path)
        with suppress(OSError):
            os.rmdir(self.directory)


def make_directory() -> str:
    directory = tempfile.mkdtemp(prefix="kvasir-")  # for this user alone
    if len(Address(directory, 1000).lifeline) > _LONGEST_PATH:
        os.rmdir(directory)
        raise ConfigError(f"the directory for sockets, {directory}, has too long a name; set TMPDIR to a shorter one")
    return directory


def identity(client: int) -> bytes:
    """A client's name as ZeroMQ knows it."""
    return b"c" + client.to_bytes(4, "big")  # names that begin with a zero are ZeroMQ's own


def client_of(name: bytes) -> int:
    return int.from_bytes(name[1:], "big")
