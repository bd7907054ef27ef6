"""Messages between engine processes and their clients: encoding, control messages, progress. API and core process."""

from __future__ import annotations

import mmap
import pickle
import struct
import time
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.errors import EngineError, KvasirError
from kvasir.messages import EngineOutput, EngineRequest

KEYS_PER_CLIENT = 40  # bits; the bits above them in a request's key are the client's number


def identity(client: int) -> bytes:
    """A client's ZeroMQ identity."""
    return b"c" + client.to_bytes(4, "big")  # ZeroMQ reserves identities that begin with a zero


def client_of(name: bytes) -> int:
    return int.from_bytes(name[1:], "big")


# ---------------------------------------------------------------- requests and outputs, as MessagePack
#
# A one-dimensional array is written as its bytes, a two-dimensional one as (columns, bytes); the field's type gives the
# dtype. A step's output is one frame, however many requests it covers.


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
    """The key of a request that cannot be decoded, so that the engine can refuse it."""
    try:
        return int(msgspec.msgpack.decode(request)["key"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------- control messages, rare and therefore pickled

# The first frame of a message is its kind.
ADD, ABORT, CALL = b"+", b"-", b"?"  # to the engine: EngineRequest, [(key, tokens kept)], CoreCall
OUTPUT, REFUSAL, RESULT = b"=", b"!", b"."  # from the engine: EngineOutput, RequestRefusal, CoreResult


@dataclass(slots=True)
class CoreCall:
    """A client calls a method of the core."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class CoreResult:
    number: int  # of the call
    value: Any
    error: KvasirError | None = None


@dataclass(slots=True)
class RequestRefusal:
    """The core did not accept a request."""

    key: int
    error: KvasirError


def encode_control(message: CoreCall | CoreResult | RequestRefusal) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode_control(data: bytes) -> Any:
    return pickle.loads(data)


def portable_error(error: BaseException, what: str) -> KvasirError:
    """An error for another process, on one line: KvasirErrors keep their type, others become EngineErrors."""
    if isinstance(error, EngineError):
        return type(error)(" ".join(str(error).split()))
    if isinstance(error, KvasirError):
        return error
    return EngineError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}".rstrip(": "))


# ---------------------------------------------------------------- progress

_CLIENTS = 60  # counters; further clients share one, which makes the router's estimate of the load less exact
_STEP = struct.Struct("=dq")  # start of the current step (0 while idle), number of steps begun
_COUNTS = struct.Struct(f"={_CLIENTS}q")  # unfinished requests of each client
_COUNT = struct.Struct("=q")


class Progress:
    """A memory page that the engine writes and its clients read, even while the engine hangs.

    Times come from `time.monotonic`, which all processes of a machine share.
    """

    def __init__(self, path: str, create: bool = False) -> None:
        size = _STEP.size + _COUNTS.size
        if create:
            Path(path).write_bytes(bytes(size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), size)
        self._steps = 0

    def begin_step(self, requests: Mapping[int, Sized]) -> None:
        """Record that a step begins, and each client's unfinished requests."""
        self._steps += 1
        _STEP.pack_into(self._page, 0, time.monotonic(), self._steps)
        for client, some in requests.items():
            _COUNT.pack_into(self._page, _offset(client), len(some))

    def remove_client(self, client: int) -> None:
        _COUNT.pack_into(self._page, _offset(client), 0)

    def set_idle(self) -> None:
        """Record that no step runs and no request is left."""
        _STEP.pack_into(self._page, 0, 0.0, self._steps)
        _COUNTS.pack_into(self._page, _STEP.size, *(0,) * _CLIENTS)

    def num_requests_of_others(self, client: int) -> int:
        """Number of unfinished requests of all clients but this one."""
        own = _COUNT.unpack_from(self._page, _offset(client))[0]
        return int(sum(_COUNTS.unpack_from(self._page, _STEP.size)) - own)

    @property
    def num_steps(self) -> int:
        return int(_STEP.unpack_from(self._page)[1])

    def seconds_in_step(self) -> float:
        """Seconds since the current step began; 0 while the engine is idle."""
        since: float = _STEP.unpack_from(self._page)[0]
        return max(0.0, time.monotonic() - since) if since else 0.0


def _offset(client: int) -> int:
    return _STEP.size + client % _CLIENTS * _COUNT.size
