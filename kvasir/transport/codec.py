"""Messages as bytes: the dataclasses of messages.py in MessagePack. API and core process.

An array is written as its bytes, with its last dimension before them where it has two; the field's type says the dtype.
A step's output is one frame whatever the number of requests in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.messages import EngineOutput, EngineRequest


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
