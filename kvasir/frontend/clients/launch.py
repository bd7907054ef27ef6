"""Starts engine processes, waits until they are ready and ends them. Imports neither torch nor a model.

The process that starts engines is their owner; other processes of its user register with engines that run already.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.engine.liveness import (
    FAILED,
    RESOLVED,
    Address,
    EngineStart,
    Registration,
    make_directory,
    remove_directory,
)
from kvasir.errors import ConfigError, EngineDeadError, EngineError, KvasirError
from kvasir.platforms.limits import parse_cpus, share, usable_cpus

ExecutorFactory = str | Callable[[EngineConfig], Any] | None  # "module:name" or a callable; None runs the model
CLOSE_SECONDS = 15.0  # how long an engine may take to end before it is killed
_MAIN = "import sys; from kvasir.engine.process import main; main(int(sys.argv[1]))"


class EngineProcess:
    """One engine process in a fresh interpreter, so the caller's script is not run again and no lock is copied.

    `liveness` is the socket between owner and engine. Closing it ends the engine.
    """

    def __init__(self, start: EngineStart, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C in a terminal reaches only the owner
        )
        theirs.close()
        self.liveness = Connection(ours.detach())
        try:
            self.liveness.send(start)
        except OSError:
            pass  # the process has ended; `wait_for` reports it
        except Exception as error:
            close_all([self])
            message = f"the engine's settings cannot be sent to its process ({error}); callables must be importable"
            raise ConfigError(message) from error

    def wait_for(self, expected: str) -> Any:
        """The value of the next message, which must be of this kind. A failed start raises the engine's own error."""
        try:
            kind, value = self.liveness.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            raise EngineError(f"the engine process ended while it started (exit code {code})") from None
        if kind == FAILED:
            assert isinstance(value, KvasirError), "the engine sends only errors of this package"
            raise value
        assert kind == expected, f"the engine sent {kind!r} instead of {expected!r}"
        return value


def start_engines(asked: EngineConfig, executor: ExecutorFactory) -> tuple[EngineConfig, str, list[EngineProcess]]:
    """Start all engine processes and wait until the settings are resolved; models are still loading then. Returns the
    resolved settings, the directory of the sockets, and the processes."""
    size = asked.parallel.data_parallel_size
    directory = make_directory(size)
    processes: list[EngineProcess] = []
    try:
        processes = launch(asked, executor, directory)
        configs: list[EngineConfig] = wait_for_all(processes, RESOLVED)
        _check_same_device(configs)
    except BaseException:
        close_all(processes)
        remove_directory(directory, size)
        raise
    return configs[0], directory, processes


def stop_engines(processes: list[EngineProcess], directory: str) -> None:
    """End the processes and remove their files."""
    close_all(processes)
    remove_directory(directory, len(processes))


def register(address: Address, client: int | None) -> tuple[Registration, Connection]:
    """Register with an engine that another process owns, under this client number or a new one."""
    try:
        liveness = Client(address.liveness, "AF_UNIX")
        liveness.send(client)
        return liveness.recv(), liveness
    except (EOFError, OSError) as error:
        raise EngineDeadError(f"no engine answers at {address.directory}: {error}") from error


def launch(asked: EngineConfig, executor: ExecutorFactory, directory: str) -> list[EngineProcess]:
    """Start all engine processes of a configuration, without waiting for them."""
    size, device = asked.parallel.data_parallel_size, asked.device.device
    if size > 1 and ":" in device:
        kind = device.partition(":")[0]
        raise ConfigError(f"device={device!r} is one device, and data_parallel_size={size} needs more; set {kind!r}")
    started: list[EngineProcess] = []
    try:
        for index in range(size):
            start = EngineStart(_with_own_cpus(asked, index), executor, directory, index, os.getpid())
            started.append(EngineProcess(start, _environment(asked, index)))
    except BaseException:
        close_all(started)
        raise
    return started


def wait_for_all(processes: list[EngineProcess], kind: str) -> list[Any]:
    """The values of the next message of each process. The first failure is raised as soon as it arrives."""
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        waiting = {each.liveness: i for i, each in enumerate(processes) if i not in values}
        for ready in wait(list(waiting)):
            index = waiting[ready]  # type: ignore[index]
            values[index] = processes[index].wait_for(kind)
    return [values[index] for index in range(len(processes))]


def close_all(processes: list[EngineProcess]) -> None:
    """End the processes in parallel. Those that take longer than CLOSE_SECONDS are killed."""
    for process in processes:
        process.liveness.close()
    end = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        try:
            process.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


def _with_own_cpus(asked: EngineConfig, index: int) -> EngineConfig:
    """The settings for one engine: each engine gets its own part of the CPUs in cpu_bind."""
    size = asked.parallel.data_parallel_size
    if size == 1 or asked.device.cpu_bind is None:
        return asked
    cpus = parse_cpus(asked.device.cpu_bind)
    if len(cpus) < size:
        raise ConfigError(
            f"cpu_bind={asked.device.cpu_bind!r} names {len(cpus)} CPUs for {size} engines; name at least {size}."
        )
    own = ",".join(map(str, share(cpus, index, size)))
    return replace(asked, device=replace(asked.device, cpu_bind=own))


def _environment(asked: EngineConfig, index: int) -> dict[str, str]:
    """Environment variables that give one engine its GPUs and its part of the CPU cores."""
    size, width = asked.parallel.data_parallel_size, asked.parallel.tensor_parallel_size
    if size == 1:
        return {}
    given: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        given["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // size))  # divided again among its workers
    if asked.device.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # an empty value hides all GPUs
        names = [str(number) for number in range(size * width)] if visible is None else visible.split(",")
        given["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * width : (index + 1) * width])
    return given


def _check_same_device(configs: list[EngineConfig]) -> None:
    kinds = [config.device.device.partition(":")[0] for config in configs]
    if len(set(kinds)) > 1:
        needed = len(configs) * configs[0].parallel.tensor_parallel_size
        raise ConfigError(
            f"data_parallel_size={len(configs)} needs {needed} {kinds[0]} devices, but there are fewer; "
            f"lower it, or set device='cpu'"
        )
