"""Starts engine processes and waits until they serve. The process that owns them; imports neither torch nor a model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.engine.transport import Start
from kvasir.errors import ConfigError, EngineError, KvasirError
from kvasir.platforms.limits import parse_cpus, share, usable_cpus

Executor = str | Callable[[EngineConfig], Any] | None
CLOSE_SECONDS = 15.0  # for an engine to end by itself
_MAIN = "import sys; from kvasir.engine.process import main; main(int(sys.argv[1]))"


class EngineProcess:
    """A process of its own, in a fresh interpreter: no second run of the caller's script, no half-copied locks."""

    def __init__(self, start: Start, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C at a terminal is the owner's to act on
        )
        theirs.close()
        self.lifeline = Connection(ours.detach())
        try:
            self.lifeline.send(start)
        except OSError:
            pass  # it has ended, and waiting for its first word will say so
        except Exception as error:
            self.close()
            message = f"the engine's settings cannot be sent to its process ({error}); callables must be importable"
            raise ConfigError(message) from error

    def wait_for(self, word: str) -> Any:
        """The value that comes with it. Whatever goes wrong before is raised as the engine's own error."""
        try:
            kind, value = self.lifeline.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            raise EngineError(f"the engine process ended while it started (exit code {code})") from None
        if kind == "failed":
            assert isinstance(value, KvasirError), "errors cross as our own"
            raise value
        assert kind == word, f"the engine said {kind!r} where {word!r} was to come"
        return value

    def close(self) -> None:
        """The closed socket tells the engine to end; one that does not is killed."""
        self.lifeline.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(asked: EngineConfig, executor: Executor, directory: str) -> list[EngineProcess]:
    """All engines of a configuration, started and not waited for."""
    size, device = asked.parallel.data_parallel_size, asked.device.device
    if size > 1 and ":" in device:
        kind = device.partition(":")[0]
        raise ConfigError(f"device={device!r} is one device, and data_parallel_size={size} needs more; set {kind!r}")
    started: list[EngineProcess] = []
    try:
        for index in range(size):
            start = Start(_with_own_cpus(asked, index), executor, directory, index, os.getpid())
            started.append(EngineProcess(start, _environment(asked, index)))
    except BaseException:
        close_all(started)
        raise
    return started


def wait_for_all(processes: list[EngineProcess], word: str) -> list[Any]:
    """What comes with it from each. The first that fails is heard first."""
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        waiting = {each.lifeline: i for i, each in enumerate(processes) if i not in values}
        for ready in wait(list(waiting)):
            index = waiting[ready]  # type: ignore[index]
            values[index] = processes[index].wait_for(word)
    return [values[index] for index in range(len(processes))]


def close_all(processes: list[EngineProcess]) -> None:
    for process in processes:
        process.lifeline.close()  # all at once, so that they end side by side
    end = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        try:
            process.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


def _with_own_cpus(asked: EngineConfig, index: int) -> EngineConfig:
    """Of the CPUs that cpu_bind names each engine gets its own."""
    size = asked.parallel.data_parallel_size
    if size == 1 or asked.device.cpu_bind is None:
        return asked
    cpus = parse_cpus(asked.device.cpu_bind)
    if len(cpus) < size:
        raise ConfigError(f"cpu_bind={asked.device.cpu_bind!r} names {len(cpus)} CPUs for {size} engines.")
    own = ",".join(map(str, share(cpus, index, size)))
    return replace(asked, device=replace(asked.device, cpu_bind=own))


def _environment(asked: EngineConfig, index: int) -> dict[str, str]:
    """One engine's share of the machine: its GPUs, or its part of the cores."""
    size, width = asked.parallel.data_parallel_size, asked.parallel.tensor_parallel_size
    if size == 1:
        return {}
    given: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        given["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // size))  # which its workers share in turn
    if asked.device.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # empty: none of them, which is a choice too
        names = [str(number) for number in range(size * width)] if visible is None else visible.split(",")
        given["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * width : (index + 1) * width])
    return given
