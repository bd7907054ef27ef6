"""How an engine gets on, in a page of memory that it shares with its clients: readable even while it hangs."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("=dq")  # when the step that runs began (0: none runs), steps begun
_SINCE = struct.Struct("=d")


class Progress:
    """The engine writes, anybody reads. Times are of `time.monotonic`, which all processes of a machine share."""

    def __init__(self, path: str, create: bool = False) -> None:
        if create:
            Path(path).write_bytes(bytes(_LAYOUT.size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._steps = 0

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        _LAYOUT.pack_into(self._page, 0, time.monotonic(), self._steps)

    def rest(self) -> None:
        """There is nothing to do."""
        _SINCE.pack_into(self._page, 0, 0.0)

    def steps(self) -> int:
        return int(_LAYOUT.unpack_from(self._page)[1])

    def busy_for(self) -> float:
        """Seconds since the step that runs began; 0 while none does."""
        since: float = _SINCE.unpack_from(self._page)[0]
        return max(0.0, time.monotonic() - since) if since else 0.0
