"""The core's end of one worker process: how it is started, spoken to, and what it died of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any

from kvasir.errors import EngineError, KvasirError
from kvasir.platforms.limits import usable_cpus

_END_SECONDS = 2.0  # for a process that has closed its socket
_SERVE = "import sys; from kvasir.executor.rank_process import serve; serve(int(sys.argv[1]))"


class RankFailed(Exception):
    """A rank has said that it failed; its words are kept in the rank."""


@dataclass(frozen=True)
class Failure:
    """What a rank died of, and when on the machine's clock: at once if it could not say, never if it has not died."""

    when: float
    error: KvasirError


class Rank:
    """The core's end of one worker process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        # A fresh interpreter, told where to import from: no second run of the caller's script, no half-copied locks.
        paths = os.pathsep.join(path for path in sys.path if path)
        share = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // size))}  # of the cores, unless told otherwise
        environment = {**share, **os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.socket = Connection(ours.detach())
        self._failure: Failure | None = None

    def receive(self) -> Any:
        kind, value = self.socket.recv()
        if kind == "error":
            self._failure = self._told(value)
            raise RankFailed
        return value

    def ended(self) -> bool:
        """Whether nothing more will come. Answers that are only early are left where they are."""
        return self.process.poll() is not None

    def last_words(self, seconds: float) -> Failure:
        """Why it failed, if it says so or ends within so many seconds."""
        end = time.monotonic() + seconds
        try:
            while self._failure is None and self.socket.poll(max(0.0, end - time.monotonic())):
                kind, value = self.socket.recv()
                if kind == "error":
                    self._failure = self._told(value)
        except (EOFError, OSError):  # it has ended, or is about to
            end = max(end, time.monotonic() + _END_SECONDS)
        if self._failure is not None:
            return self._failure
        try:
            code = self.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Failure(inf, EngineError(f"worker {self.rank} does not answer"))
        return Failure(-inf, EngineError(f"worker {self.rank} ended (exit code {code})"))

    def _told(self, value: tuple[float, KvasirError | str]) -> Failure:
        when, said = value
        return Failure(when, said if isinstance(said, KvasirError) else EngineError(f"worker {self.rank}: {said}"))

    def close_socket(self) -> None:
        self.socket.close()

    def end(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
