"""Several API processes before one engine: this process owns the engine and the socket, they accept from it.

Each is a fresh interpreter with a client of its own to the engine. One that ends unasked ends them all: whoever runs
the server is to start it anew.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineError
from kvasir.frontend.clients.engines import Engines
from kvasir.log import get_logger
from kvasir.server.api_keys import load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.launch import listen, run, set_up_logging
from kvasir.server.lifecycle import one_line
from kvasir.server.metrics import MULTIPROCESS
from kvasir.server.state import Phases, ServerState

logger = get_logger(__name__)
_MAIN = "import sys; from kvasir.server.supervisor import api_process; api_process(int(sys.argv[1]))"
_LOOK_SECONDS = 0.1
_SPARE_SECONDS = 15.0  # beyond the drain's limit, before a process is killed


@dataclass(slots=True)
class _Start:
    """What an API process is told first."""

    config: ServerConfig
    model: str
    socket: int


class _Stopped(BaseException):
    """SIGTERM or SIGINT came while the engine started."""


def supervise(asked: EngineConfig, config: ServerConfig, executor: Any = None) -> int:
    load_keys(config)  # what is wrong with them is said here, once
    sock = listen(config)
    with tempfile.TemporaryDirectory(prefix="kvasir-metrics-") as directory:
        start = _Start(config, asked.model.model, sock.fileno())
        family = _Family([_Child(start, directory) for _ in range(config.api_server_count)])
        try:
            return family.run(asked, executor, config.shutdown_timeout)
        finally:
            family.kill()
            sock.close()
            if family.last_words:
                print(f"kvasir: error: {family.last_words}", file=sys.stderr)


class _Child:
    def __init__(self, start: _Start, metrics: str) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), start.socket],
            env={**os.environ, "PYTHONPATH": paths, MULTIPROCESS: metrics},
            start_new_session=True,  # Ctrl-C is passed on by us
        )
        theirs.close()
        self.link = Connection(ours.detach())
        self.link.send(start)

    def tell(self, word: str, value: Any) -> None:
        try:
            self.link.send((word, value))
        except OSError:
            logger.warning("an API process has ended early")


class _Family:
    def __init__(self, children: list[_Child]) -> None:
        self.children = children
        self.stopping = False
        self.last_words = ""  # why it ended, if not because it was told to

    def run(self, asked: EngineConfig, executor: Any, limit: float) -> int:
        engines: Engines | None = None
        self._on_signals(self._interrupt_start)
        try:
            engines = Engines.start(asked, executor)
            self._tell("phase", "model")
            engines.wait()
            self._on_signals(self._pass_on)
            self._tell("engine", engines.directory)
            return self._wait(engines, limit)
        except _Stopped:
            return 0
        except Exception as error:
            self._tell("failed", EngineError(one_line(error)))
            raise
        finally:
            if engines is not None:
                engines.close()

    def _wait(self, engines: Engines, limit: float) -> int:
        """Until all have ended as they were told to, or one has not."""
        until = None
        while True:
            codes = [child.process.poll() for child in self.children]
            if all(code is not None for code in codes) and self.stopping:
                return 0 if not any(codes) else 1
            if not self.stopping and any(code is not None for code in codes):
                cause = engines.find_death()
                self.last_words = "an API process ended unasked" if cause is None else one_line(cause)
                return 1
            if self.stopping:
                until = until or time.monotonic() + limit + _SPARE_SECONDS
                if time.monotonic() > until:
                    return 1
            time.sleep(_LOOK_SECONDS)

    # ------------------------------------------------------------ signals

    def _on_signals(self, handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    def _interrupt_start(self, number: int, frame: FrameType | None) -> None:
        raise _Stopped

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)

    def _tell(self, word: str, value: Any) -> None:
        for child in self.children:
            child.tell(word, value)

    def kill(self) -> None:
        """Those that still run: gently, then not."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(_SPARE_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def api_process(handle: int) -> None:
    """One of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(handle)
    start: _Start = link.recv()
    set_up_logging(start.config)
    state = ServerState(start.config, start.model, start.config.api_server_count)

    def attach(phases: Phases) -> AsyncLLM:
        while True:
            word, value = link.recv()
            if word == "failed":
                raise value
            if word == "engine":
                return AsyncLLM.attach(value)
            phases.enter(value)

    sys.exit(run(state, attach, socket.socket(fileno=start.socket), owns_socket=False))
