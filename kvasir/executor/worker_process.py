"""One worker process of a MultiprocExecutor: the core's end, which starts it, and the worker's end, which serves it.

The core sends (method name, arguments) over a socket pair. The worker calls these methods of its Worker until the
socket closes. No torch is imported in the core's process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from multiprocessing.connection import Connection
from typing import Any

from kvasir import log
from kvasir.config.engine import EngineConfig
from kvasir.errors import EngineError, KvasirError
from kvasir.platforms.cpu import prepare_cpu
from kvasir.platforms.limits import usable_cpus

_EXIT_SECONDS = 2.0  # for a process to end after it closed its socket
_SERVE = "import sys; from kvasir.executor.worker_process import serve; serve(int(sys.argv[1]))"


# ---------------------------------------------------------------- the core's end


class WorkerFailed(Exception):
    """A worker has reported an error; its WorkerProcess keeps it."""


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker failed, and when by the machine's clock: -inf if it ended without a report, inf if it still runs."""

    when: float
    error: KvasirError


class WorkerProcess:
    """The core's end of one worker process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        # A new interpreter with the same import paths: it neither runs the caller's script again nor copies locks.
        paths = os.pathsep.join(path for path in sys.path if path)
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // size))}  # the user's own value takes precedence
        environment = {**threads, **os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.socket = Connection(ours.detach())
        self.answers: deque[Any] = deque()  # answers and results that were received and not read
        self._loads: list[tuple[int, str | None]] = []
        self._failure: WorkerFailure | None = None

    def receive(self) -> None:
        """Wait for the next message and keep it. Raises WorkerFailed if it is an error."""
        kind, value = self.socket.recv()
        if kind == "error":
            self._failure = self._failure_from(value)
            raise WorkerFailed
        if kind == "load":
            self._loads.append(value)
        else:
            self.answers.append(value)

    def take_loads(self) -> list[tuple[int, str | None]]:
        """Return the loads that the worker has reported: slots, each with an error or None."""
        while self.socket.poll():
            self.receive()
        loads, self._loads = self._loads, []
        return loads

    def has_exited(self) -> bool:
        """Whether the process has ended. Answers that it sent before stay readable."""
        return self.process.poll() is not None

    def wait_for_failure(self, seconds: float) -> WorkerFailure:
        """Return why the worker failed, after waiting up to `seconds` for its report or its end."""
        end = time.monotonic() + seconds
        try:
            while self._failure is None and self.socket.poll(max(0.0, end - time.monotonic())):
                kind, value = self.socket.recv()
                if kind == "error":
                    self._failure = self._failure_from(value)
        except (EOFError, OSError):  # it has ended, or is about to
            end = max(end, time.monotonic() + _EXIT_SECONDS)
        if self._failure is not None:
            return self._failure
        try:
            code = self.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return WorkerFailure(inf, EngineError(f"worker {self.rank} does not answer"))
        return WorkerFailure(-inf, EngineError(f"worker {self.rank} ended (exit code {code})"))

    def _failure_from(self, report: tuple[float, KvasirError | str]) -> WorkerFailure:
        when, cause = report
        error = cause if isinstance(cause, KvasirError) else EngineError(f"worker {self.rank}: {cause}")
        return WorkerFailure(when, error)

    def close_socket(self) -> None:
        self.socket.close()

    def end(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to end, then kill it."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ---------------------------------------------------------------- the worker's end


def serve(handle: int) -> None:
    """Run a worker process. `handle` is the file descriptor of its end of the socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to workers too, but the core handles it
    _exit_with_core()
    log.write_in_background()
    core = CoreConnection(Connection(handle))
    try:
        _serve(core)
    except BaseException as error:
        # A KvasirError is sent as it is: it may refuse a setting of the user.
        cause = error if isinstance(error, KvasirError) else f"{type(error).__name__}: {error}"
        try:
            core.send(("error", (time.monotonic(), cause)))
        finally:
            log.flush()
            os._exit(1)  # a normal exit could hang in a collective with a dead rank


class CoreConnection:
    """The worker's end of the socket. If the core has closed its own, the process exits. An OSError of the socket must
    be handled here, because elsewhere it would be an error of the worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.poll = connection.poll

    def recv(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            os._exit(0)


def _serve(core: CoreConnection) -> None:
    _, start = core.recv()
    worker = _make_worker(*start)
    rank = start[1]
    core.send(("ready", None))
    results: deque[Any] = deque()
    num_loading = 0  # loads that are not reported
    while True:
        while results and not _has_message_first(core, results[0]):
            core.send(("result", results.popleft().result()))
        while num_loading:  # report loads as soon as they are done; messages of the core come first
            num_loading -= _report_loads(core, worker)
            if not num_loading or core.poll(0.001):
                break
        name, args = core.recv()
        answer = getattr(worker, name)(*args)
        num_loading += name == "load"
        if name == "sample":
            if rank == 0:
                results.append(answer)
        elif name not in ("execute", "load"):
            core.send(("answer", answer))


def _report_loads(core: CoreConnection, worker: Any) -> int:
    """Tell the core which loads are done, and return their number."""
    loads = worker.finished_loads()
    for load in loads:
        core.send(("load", load))
    return len(loads)


def _has_message_first(core: CoreConnection, result: Any) -> bool:
    """Wait for the device or for a message of the core. True if there is a message: the worker launches new work before
    it sends a result."""
    while not result.done():
        if core.poll(0.0001):
            return True
    return core.poll()


def _make_worker(config: EngineConfig, rank: int, size: int, rendezvous: str) -> Any:
    prepare_cpu()  # must come before torch
    if config.device.device != "cpu":
        kind = config.device.device.split(":")[0]
        config = replace(config, device=replace(config.device, device=f"{kind}:{rank}"))
        if kind == "cuda":
            import_module("torch").cuda.set_device(rank)  # collectives use the current device
    mesh = import_module("kvasir.layers.mesh").join(config.device.device, rank, size, f"{rendezvous}/store")
    return import_module("kvasir.worker.worker").Worker(config, mesh)


def _exit_with_core() -> None:
    """Exit when the core's process has ended. An idle worker sees its socket close, but one inside a collective does
    not."""
    core = os.getppid()

    def watch() -> None:
        while os.getppid() == core:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
