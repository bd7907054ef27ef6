"""Who is there: a socket per client, open as long as the client lives, and one to the process that owns the engine.

A closed socket is a dead process, in either direction; the kernel sees to that. Core process, a thread of its own: the
engine's loop only looks at what is noted here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.engine.transport import Address
from kvasir.log import get_logger

logger = get_logger(__name__)
GRACE_SECONDS = 5.0  # for the loop to end by itself once the owner is gone
_LOOK_SECONDS = 1.0  # how often the owner's process id is looked at


class Lifelines(threading.Thread):
    def __init__(self, owner: Connection, owner_pid: int, address: Address) -> None:
        super().__init__(daemon=True, name="lifelines")
        self.config: EngineConfig | None = None  # what new clients are told; before it is known none is let in
        self.startup: dict[str, float] = {}  # and how long each part of the start took
        self.over = False  # the owner is gone, or done with the engine
        self.gone: deque[int] = deque()  # clients that have left
        self.clients: dict[int, Connection] = {0: owner}  # the owner is a client too
        self.grace_seconds = 0.0  # nothing is running yet that could end by itself
        self._owner, self._owner_pid = owner, owner_pid
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address.lifeline)
        self._listener.listen()
        self._new: list[Connection] = []  # connected, and not introduced yet
        self._next = 1
        self.wake, self._waker = socket.socketpair()  # readable when something was noted
        self.wake.setblocking(False)

    def run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # an engine that nobody watches could outlive its owner
                logger.exception("Looking after clients failed; going on")
                time.sleep(_LOOK_SECONDS)
            if self.over or os.getppid() != self._owner_pid:
                self._end()

    def _look(self) -> None:
        everybody: list[Connection | socket.socket] = [self._listener, *self._new, *self.clients.values()]
        for ready in wait(everybody, _LOOK_SECONDS):
            if not isinstance(ready, Connection):
                self._new.append(Connection(self._listener.accept()[0].detach()))
            elif ready in self._new:
                self._introduce(ready)
            else:
                self._hear(ready)

    def tell_all(self, word: Any) -> None:
        for client in list(self.clients.values()):
            with suppress(OSError):
                client.send(word)

    def hush(self) -> None:
        """From here on `wake` is readable when something more is noted. Look at the notes after that, not before."""
        with suppress(BlockingIOError):
            self.wake.recv(4096)

    def take_gone(self) -> list[int]:
        """Clients that have left since the last time."""
        self.hush()
        return [self.gone.popleft() for _ in range(len(self.gone))]

    # ------------------------------------------------------------ the thread's own

    def _introduce(self, client: Connection) -> None:
        """A client says which number it has from another engine of this owner, or None to be given one."""
        self._new.remove(client)
        if self.config is None:
            client.close()
            return
        try:
            number = client.recv()
            if number is None:
                number, self._next = self._next, self._next + 1
            self.clients[number] = client  # before it hears of it: its first request may be here at once
            client.send((number, self.config, self.startup))
        except (EOFError, OSError):
            self._let_go(client)
        except Exception:
            logger.exception("What a client says of itself makes no sense; it is not let in")
            self._let_go(client)

    def _hear(self, client: Connection) -> None:
        """Nobody speaks here after the introduction: something to read is the end."""
        with suppress(EOFError, OSError):
            client.recv()
            return
        if client is self._owner:
            self.over = True
            return
        self.gone += self._let_go(client)
        self._note()

    def _let_go(self, client: Connection) -> list[int]:
        """Close the socket. Returns the number the client had, if it had one."""
        numbers = [number for number, other in self.clients.items() if other is client]
        for number in numbers:
            del self.clients[number]
        client.close()
        return numbers

    def _note(self) -> None:
        self._waker.send(b".")

    def _end(self) -> None:
        """Let the loop end; if it hangs, end the process, and with it the workers, which watch it."""
        self.over = True
        self._note()
        time.sleep(self.grace_seconds)
        self._address.remove()
        os._exit(1)
