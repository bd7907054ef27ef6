"""Where an engine is found: files in one directory that only its owner's user may enter. API and core process."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.config.engine import EngineConfig
from kvasir.errors import ConfigError, EngineError, KvasirError
from kvasir.messages import EngineOutput, EngineRequest

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


# ----------------------------------------------------------------
# Messages as bytes: the dataclasses of messages.py in MessagePack. API and core process.
#
# An array is written as its bytes, with its last dimension before them where it has two; the field's type says the
# dtype. A step's output is one frame whatever the number of requests in it.


def _from_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return data if value.ndim == 1 else (value.shape[-1], data)


def _to_array(kind: Any, value: Any) -> NDArray[Any]:
    dtype = _dtype(kind)
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype)
    columns, data = value
    return np.frombuffer(data, dtype).reshape(-1, columns)


@cache
def _dtype(kind: Any) -> Any:
    """NDArray[np.int32] -> int32."""
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot come from another process")
    return np.dtype(get_args(get_args(kind)[1])[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_request_decoder = msgspec.msgpack.Decoder(EngineRequest, dec_hook=_to_array)
_output_decoder = msgspec.msgpack.Decoder(EngineOutput, dec_hook=_to_array)

encode = _encoder.encode
decode_request = _request_decoder.decode
decode_output = _output_decoder.decode
decode_aborts = msgspec.msgpack.Decoder(list[tuple[int, int | None]]).decode  # (key, output tokens kept)


def key_of(request: bytes) -> int | None:
    """The key of a request that cannot be decoded, so that its caller can be told."""
    try:
        return int(msgspec.msgpack.decode(request)["key"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


# ----------------------------------------------------------------
# What client and engine say to each other beside requests and outputs: rare, so pickled. API and core process.
#
# Both processes belong to one user and meet in a directory that nobody else may enter.

# First frame of a message, so that its kind is known before it is decoded.
ADD, ABORT, ASK = b"+", b"-", b"?"  # to the engine: an EngineRequest, [(key, tokens kept)], a Question
OUTPUT, REFUSED, ANSWER = b"=", b"!", b"."  # from it: an EngineOutput, a Refused, an Answer


@dataclass(slots=True)
class Start:
    """What an engine process is told when it starts."""

    asked: EngineConfig
    executor: (
        str | Callable[[EngineConfig], Any] | None
    )  # in place of the model's: "module:name", or something picklable
    directory: str
    index: int
    owner: int  # process id


@dataclass(slots=True)
class Question:
    number: int
    name: str  # a method of the core
    args: tuple[Any, ...]


@dataclass(slots=True)
class Answer:
    number: int
    value: Any
    error: KvasirError | None = None


@dataclass(slots=True)
class Refused:
    """The core did not take a request."""

    key: int
    error: KvasirError


def write(word: Question | Answer | Refused) -> bytes:
    return pickle.dumps(word, protocol=pickle.HIGHEST_PROTOCOL)


def read(data: bytes) -> Any:
    return pickle.loads(data)


def as_one_sentence(error: BaseException, what: str) -> KvasirError:
    """An error as another process is told, on one line: our own with their types, others with their names."""
    if isinstance(error, EngineError):
        return type(error)(" ".join(str(error).split()))
    if isinstance(error, KvasirError):
        return error
    return EngineError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}".rstrip(": "))


# ----------------------------------------------------------------
# How an engine gets on, in a page of memory that it shares with its clients: readable even while it hangs.

_CLIENTS = 60  # have a place of their own; later ones share, which only blurs a guess at the load
_STEP = struct.Struct("=dq")  # when the step that runs began (0: none runs), steps begun
_COUNTS = struct.Struct(f"={_CLIENTS}q")  # each client's requests
_COUNT = struct.Struct("=q")


class Progress:
    """The engine writes, anybody reads. Times are of `time.monotonic`, which all processes of a machine share."""

    def __init__(self, path: str, create: bool = False) -> None:
        size = _STEP.size + _COUNTS.size
        if create:
            Path(path).write_bytes(bytes(size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), size)
        self._steps = 0

    def step(self, requests: Mapping[int, Sized]) -> None:
        """A step begins; the engine has these requests, by client."""
        self._steps += 1
        _STEP.pack_into(self._page, 0, time.monotonic(), self._steps)
        for client, some in requests.items():
            _COUNT.pack_into(self._page, _place(client), len(some))

    def forget(self, client: int) -> None:
        """A client has left."""
        _COUNT.pack_into(self._page, _place(client), 0)

    def rest(self) -> None:
        """There is nothing to do."""
        _STEP.pack_into(self._page, 0, 0.0, self._steps)
        _COUNTS.pack_into(self._page, _STEP.size, *(0,) * _CLIENTS)

    def requests_of_others(self, client: int) -> int:
        """How many requests clients other than this one have there."""
        own = _COUNT.unpack_from(self._page, _place(client))[0]
        return int(sum(_COUNTS.unpack_from(self._page, _STEP.size)) - own)

    @property
    def num_steps(self) -> int:
        return int(_STEP.unpack_from(self._page)[1])

    def busy_for(self) -> float:
        """Seconds since the step that runs began; 0 while none does."""
        since: float = _STEP.unpack_from(self._page)[0]
        return max(0.0, time.monotonic() - since) if since else 0.0


def _place(client: int) -> int:
    return _STEP.size + client % _CLIENTS * _COUNT.size
