"""How an engine gets on, in a page of memory that it shares with its clients: readable even while it hangs."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping, Sized
from pathlib import Path

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
