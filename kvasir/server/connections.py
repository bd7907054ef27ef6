"""The connections of one API process: how many there may be, which one makes room, and when their time is up."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from kvasir.log import get_logger
from kvasir.server.config import ServerConfig
from kvasir.server.limits import BodyMemory

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

logger = get_logger(__name__)

SWEEP_TICKS = 5  # of uvicorn's ticks, a tenth of a second each, between two looks at the deadlines
_SPARE_CONNECTIONS = 16  # beyond the cap, for probes
_SPARE_DESCRIPTORS = 32  # of the process, half of them for these connections
_MIN_IDLE_SECONDS = 1.0  # before a connection is closed to make room
_REPORT_SECONDS = 60.0  # between two log lines about a full server
_MIN_BYTES_PER_SECOND = 16 << 10  # of a body, on average, after the time limit


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as it may have."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _descriptor_limit() -> int:
    return sys.maxsize if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _spare_descriptors() -> int:
    return min(_SPARE_DESCRIPTORS, _descriptor_limit() // 4)


class Connections:
    """The connections of one API process. `failed` counts a refusal under its cause."""

    def __init__(self, config: ServerConfig, memory: BodyMemory, failed: Callable[[str], None]) -> None:
        self.config = config
        self.memory = memory
        self.failed = failed
        self.open: set[TimedConnection] = set()  # without the spare ones
        self.idle: dict[TimedConnection, float] = {}  # since when, longest first
        self.spare: dict[TimedConnection, None] = {}  # beyond the cap, oldest first
        self._reported = -math.inf

    def admit(self, new: TimedConnection) -> bool:
        """Whether a connection may ask for anything. Beyond the cap it may only probe."""
        problem = self._shortage(new)
        if problem is not None and self._close_longest_idle():
            problem = None
        if problem is None:
            self.open.add(new)
            return True
        self._report(problem)
        self.spare[new] = None
        if len(self.spare) > min(_SPARE_CONNECTIONS, _spare_descriptors() // 2):
            next(iter(self.spare)).drop()
        return False

    def remove(self, old: TimedConnection) -> None:
        self.open.discard(old)
        self.forget(old)

    def forget(self, old: TimedConnection) -> None:
        """Look no more for a connection that is to make room."""
        self.idle.pop(old, None)
        self.spare.pop(old, None)

    def upgrade(self, old: TimedConnection, new: TimedConnection) -> None:
        """A WebSocket takes the place of the HTTP connection it began as."""
        self.remove(old)
        self.open.add(new)

    def sweep(self, connections: Iterable[Any]) -> None:
        """End those whose time is up. Called every `SWEEP_TICKS`."""
        now = time.monotonic()
        for each in list(connections):
            each.check_time(now)
        self.memory.trim()

    def _shortage(self, new: TimedConnection) -> str | None:
        most = self.config.max_connections
        if len(self.open) >= most:
            return f"{most} connections are open (--max-connections)"
        # The kernel hands out the lowest free descriptor, so a high one means that few are left.
        sock = new.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= _descriptor_limit() - _spare_descriptors():
            return f"the process may open {_descriptor_limit()} files (ulimit -n), and nearly all are in use"
        return None

    def _close_longest_idle(self) -> bool:
        for connection, since in self.idle.items():
            if time.monotonic() - since < _MIN_IDLE_SECONDS:
                return False
            connection.drop()
            return True
        return False

    def _report(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            logger.warning("new connections get 503, except for probes: %s", problem)


class TimedConnection(ABC):
    """What both protocols share: a deadline for what the client has to send, and one for what it has to read."""

    pool: Connections
    transport: asyncio.Transport
    deadline: float = math.inf
    _unsent = 0
    _sent_at = 0.0

    @abstractmethod
    def time_ran_out(self) -> None:
        """Answer, or close, because the client did not send in time."""

    def drop(self) -> None:
        """Close without a word."""
        self.pool.forget(self)
        self.transport.close()

    def check_time(self, now: float) -> None:
        """End the connection if its client does not send, or does not read, in time."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent or self._unsent == 0:
            self._sent_at = now
        self._unsent = unsent
        if now - self._sent_at > self.pool.config.send_timeout:
            self.transport.abort()
        elif now > self.deadline:
            self.time_ran_out()

    def resume_writing(self) -> None:
        """The client has read something, whatever was added since."""
        self._sent_at = time.monotonic()
        super().resume_writing()  # type: ignore[misc]

    def body_deadline(self, began: float, num_bytes: int) -> float:
        """A body must not stop, and must arrive at some speed on average."""
        seconds, now = self.pool.config.body_timeout, time.monotonic()
        return min(now, began + num_bytes / _MIN_BYTES_PER_SECOND) + seconds
