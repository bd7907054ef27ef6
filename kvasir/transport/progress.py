"""How an engine gets on, in a page of memory that it shares with its clients: readable even while it hangs."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("=dqq")  # when the step that runs began (0: none runs), requests it has, steps begun


class Progress:
    """The engine writes, anybody reads. Times are of `time.monotonic`, which all processes of a machine share."""

    def __init__(self, path: str, create: bool = False) -> None:
        if create:
            Path(path).write_bytes(bytes(_LAYOUT.size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._steps = 0

    def step(self, num_requests: int) -> None:
        """A step begins."""
        self._steps += 1
        _LAYOUT.pack_into(self._page, 0, time.monotonic(), num_requests, self._steps)

    def rest(self) -> None:
        """There is nothing to do."""
        _LAYOUT.pack_into(self._page, 0, 0.0, 0, self._steps)

    @property
    def num_requests(self) -> int:
        return int(_LAYOUT.unpack_from(self._page)[1])

    @property
    def num_steps(self) -> int:
        return int(_LAYOUT.unpack_from(self._page)[2])

    def busy_for(self) -> float:
        """Seconds since the step that runs began; 0 while none does."""
        since: float = _LAYOUT.unpack_from(self._page)[0]
        return max(0.0, time.monotonic() - since) if since else 0.0
