"""The worker's process: answers what the core asks until the socket closes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.errors import KvasirError
from kvasir.platforms.cpu_features import prepare_cpu


def serve(handle: int) -> None:
    """`handle` is our end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to us too; the core decides what it means
    _end_with_the_core()
    core = Core(Connection(handle))
    try:
        _serve(core)
    except BaseException as error:
        # A KvasirError goes as it is: it may be a setting of the user's, refused on this rank.
        said = error if isinstance(error, KvasirError) else f"{type(error).__name__}: {error}"
        try:
            core.send(("error", (time.monotonic(), said)))
        finally:
            os._exit(1)  # not by returning: a collective that waits for a dead rank would not let us


class Core:
    """Our end of the socket. Others may raise an OSError, too; here it means that the core is gone, or done with us."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self.poll = socket.poll

    def recv(self) -> Any:
        try:
            return self._socket.recv()
        except (EOFError, OSError):
            os._exit(0)

    def send(self, message: Any) -> None:
        try:
            self._socket.send(message)
        except OSError:
            os._exit(0)


def _serve(core: Core) -> None:
    _, start = core.recv()
    worker = _start(*start)
    rank = start[1]
    core.send(("ready", None))
    results: deque[Any] = deque()
    while True:
        while results and not _next_message_comes_first(core, results[0]):
            core.send(("result", results.popleft().result()))
        name, args = core.recv()
        answer = getattr(worker, name)(*args)
        if name == "sample":
            if rank == 0:
                results.append(answer)
        elif name != "execute":
            core.send(("answer", answer))


def _next_message_comes_first(core: Core, result: Any) -> bool:
    """Wait until the device is done or the core wants more of it; more work is started before results are sent."""
    while not result.done():
        if core.poll(0.0001):
            return True
    return core.poll()


def _start(config: EngineConfig, rank: int, size: int, meeting: str) -> Any:
    prepare_cpu()  # must come before torch
    if config.device.device != "cpu":
        kind = config.device.device.split(":")[0]
        config = replace(config, device=replace(config.device, device=f"{kind}:{rank}"))
        if kind == "cuda":
            import_module("torch").cuda.set_device(rank)  # collectives use the current one
    mesh = import_module("kvasir.distributed.mesh").join(config.device.device, rank, size, f"{meeting}/store")
    return import_module("kvasir.worker.worker").Worker(config, mesh)


def _end_with_the_core() -> None:
    """The socket tells an idle worker that the core is gone; one inside a collective is told by this."""
    core = os.getppid()

    def watch() -> None:
        while os.getppid() == core:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
