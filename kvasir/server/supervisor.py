"""Several API processes in front of one engine: this process owns the engine and the socket, and they accept from it.

Each is a fresh interpreter with its own client of the engine. If one ends unasked, all are ended, so that a service
manager restarts the server.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.config.scratch import make_scratch, remove_scratch
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineError
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.log import get_logger
from kvasir.server.api_keys import load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.launch import listen, print_error, run, set_up_logging
from kvasir.server.lifecycle import Peers, one_line
from kvasir.server.metrics import MULTIPROCESS
from kvasir.server.state import ServerPhase, ServerState

logger = get_logger(__name__)
_MAIN = "import sys; from kvasir.server.supervisor import api_process; api_process(int(sys.argv[1]))"
_WATCH_SECONDS = 0.1
_KILL_SECONDS = 15.0  # beyond the drain's limit, until a process is killed


@dataclass(slots=True)
class _Start:
    """The first message to an API process."""

    config: ServerConfig
    model: str
    socket: int


class _Stopped(BaseException):
    """SIGTERM or SIGINT came while the engine started."""


def supervise(asked: EngineConfig, config: ServerConfig, executor: Any = None) -> int:
    load_keys(config)  # reports wrong keys once, instead of in every process
    sock = listen(config)
    directory = make_scratch("metrics-")
    start = _Start(config, asked.model.model, sock.fileno())
    processes = _ApiProcesses([_ApiProcess(start, directory) for _ in range(config.api_server_count)])
    try:
        return processes.run(asked, executor, config.shutdown_timeout)
    finally:
        processes.kill()
        sock.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)
        remove_scratch(directory)
        if processes.error:
            print_error(processes.error)


class _ApiProcess:
    def __init__(self, start: _Start, metrics: str) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), start.socket],
            env={**os.environ, "PYTHONPATH": paths, MULTIPROCESS: metrics},
            start_new_session=True,  # this process passes Ctrl-C on
        )
        theirs.close()
        self.link = Connection(ours.detach())
        self.link.send(start)

    def send(self, word: str, value: Any) -> None:
        try:
            self.link.send((word, value))
        except OSError:
            logger.warning("an API process has ended early")


class _ApiProcesses:
    def __init__(self, children: list[_ApiProcess]) -> None:
        self.children = children
        self.stopping = False
        self.error = ""  # why it ended, unless by a signal

    def run(self, asked: EngineConfig, executor: Any, limit: float) -> int:
        engines: EngineClient | None = None
        self._on_signals(self._interrupt_start)
        try:
            engines = EngineClient.start(asked, executor)
            self._send_all("phase", "model")
            engines.wait_ready()
            self._on_signals(self._pass_on)
            self._send_all("engine", engines.directory)
            return self._wait(engines, limit)
        except _Stopped:
            return 0
        except Exception as error:
            self._send_all("failed", EngineError(one_line(error)))
            raise
        finally:
            if engines is not None:
                engines.close()

    def _wait(self, engines: EngineClient, limit: float) -> int:
        """Wait until all have ended after a signal, or one ends without."""
        until = None
        while True:
            codes = [child.process.poll() for child in self.children]
            if all(code is not None for code in codes) and self.stopping:
                return 0 if not any(codes) else 1
            if not self.stopping and any(code is not None for code in codes):
                cause = engines.check_death()
                self.error = "an API process ended unasked" if cause is None else one_line(cause)
                return 1
            if self.stopping:
                until = until or time.monotonic() + limit + _KILL_SECONDS
                if time.monotonic() > until:
                    return 1
            time.sleep(_WATCH_SECONDS)

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

    def _send_all(self, word: str, value: Any) -> None:
        for child in self.children:
            child.send(word, value)

    def kill(self) -> None:
        """End those that still run, by SIGTERM and then by SIGKILL."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def api_process(handle: int) -> None:
    """The main function of an API process. `handle` is its connection to the supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(handle)
    start: _Start = link.recv()
    set_up_logging(start.config)
    state = ServerState(start.config, start.model, start.config.api_server_count)
    state.peers = Peers(os.environ[MULTIPROCESS], start.config.api_server_count)

    def attach(phase: ServerPhase) -> AsyncLLM:
        while True:
            word, value = link.recv()
            if word == "failed":
                raise value
            if word == "engine":
                return AsyncLLM.attach(value)
            phase.enter(value)

    sys.exit(run(state, attach, socket.socket(fileno=start.socket), owns_socket=False))
