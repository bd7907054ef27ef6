"""Executor of tensor parallelism: one worker process per rank. All get the same plan; rank 0 returns the results.

A plan is pickled once and sent to every worker over a socket pair, as (method name, arguments). The core waits for
answers and for closed sockets at the same time, so the end of any worker is an error at once and ends the others. When
a worker dies, the others fail in their next collective and may report first; the error raised is that of the worker
that failed first. A worker calls these methods of its Worker until the socket closes, and exits when the core's process
ends. No torch is imported in the core's process.
"""

from __future__ import annotations

import os
import pickle
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
from multiprocessing.connection import Connection, wait
from typing import Any

from kvasir import log
from kvasir.config.engine import EngineConfig
from kvasir.config.scratch import make_scratch, remove_scratch
from kvasir.errors import EngineError, KvasirError
from kvasir.messages import (
    AdapterTargets,
    DeviceMemory,
    KVSpec,
    Resource,
    SampleInputs,
    StepCosts,
    StepPlan,
    StepResult,
)
from kvasir.platforms.cpu import prepare_cpu
from kvasir.platforms.limits import usable_cpus

_EXIT_SECONDS = 2.0  # for a process to end after it closed its socket
_SERVE = "import sys; from kvasir.executor.multiproc import serve; serve(int(sys.argv[1]))"
CLOSE_SECONDS = 10.0  # for workers to end before they are killed
REPORT_SECONDS = 2.0  # after a failure, for all workers to report theirs


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


class MultiprocExecutor:
    """An Executor over several processes."""

    def __init__(self, config: EngineConfig) -> None:
        self.overlaps = config.device.device != "cpu"
        self.size = config.parallel.tensor_parallel_size
        self._rendezvous = make_scratch()
        self._workers: list[WorkerProcess] = []
        self._futures: deque[RemoteFuture] = deque()  # results that have not been read, oldest first
        # slots that are being loaded: the ranks that are done, and what went wrong on some
        self._loading: dict[int, tuple[list[int], list[str]]] = {}
        try:
            for rank in range(self.size):
                self._workers.append(WorkerProcess(rank, self.size))
                start = (config, rank, self.size, self._rendezvous)
                self._send(self._workers[rank], pickle.dumps(("start", start)))
            self._answers()
        except BaseException:
            self.close()
            raise

    def kv_spec(self) -> KVSpec:
        specs: list[KVSpec] = self._ask("kv_spec")
        return specs[0]

    def available_kv_bytes(self) -> int:
        free: list[int] = self._ask("available_kv_bytes")
        return min(free)

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._ask("allocate_kv", num_blocks, num_host_blocks)

    def measure_costs(self) -> StepCosts:
        costs: list[StepCosts] = self._ask("measure_costs")  # a step takes as long as its slowest rank
        return StepCosts(max(c.copy_block for c in costs), max(c.compute_token for c in costs))

    def measure_steps(self) -> list[tuple[int, float]]:
        ranks: list[list[tuple[int, float]]] = self._ask("measure_steps")
        return [max(step, key=lambda each: each[1]) for step in zip(*ranks, strict=True)]

    def memory(self) -> DeviceMemory:
        """Return the sums over all ranks."""
        ranks: list[DeviceMemory] = self._ask("memory")
        return DeviceMemory(
            total=_sum([each.total for each in ranks]),
            weights=sum(each.weights for each in ranks),
            kv_cache=sum(each.kv_cache for each in ranks),
            largest_step=_sum([each.largest_step for each in ranks]),
            outside=_sum([each.outside for each in ranks]),
            graphs=sum(each.graphs for each in ranks),
            graphs_expected=sum(each.graphs_expected for each in ranks),
        )

    def adapter_targets(self) -> AdapterTargets | None:
        targets: list[AdapterTargets | None] = self._ask("adapter_targets")
        return targets[0]

    def load(self, slot: int, resource: Resource) -> None:
        self._loading[slot] = [], []
        self._send_all("load", slot, resource)

    def finished_loads(self, seconds: float = 0.0) -> list[tuple[int, str | None]]:
        """A load is done when it is done on every rank."""
        end = time.monotonic() + seconds
        while True:
            for worker in self._workers:
                self._take_loads(worker)
            done = [slot for slot, (ranks, _) in self._loading.items() if len(ranks) == self.size]
            if done or time.monotonic() >= end:
                return [(slot, next(iter(self._loading.pop(slot)[1]), None)) for slot in done]
            wait([worker.socket for worker in self._workers], max(0.0, end - time.monotonic()))

    def _take_loads(self, worker: WorkerProcess) -> None:
        try:
            loads = worker.take_loads()
        except (WorkerFailed, EOFError, OSError):
            raise self._first_failure() from None
        for slot, error in loads:
            ranks, errors = self._loading[slot]
            ranks.append(worker.rank)
            errors += [] if error is None else [error]

    def execute(self, plan: StepPlan) -> None:
        self._send_all("execute", plan)

    def sample(self, inputs: SampleInputs | None = None) -> RemoteFuture:
        self._send_all("sample", inputs)
        future = RemoteFuture(self)
        self._futures.append(future)
        return future

    def close(self) -> None:
        for worker in self._workers:
            worker.close_socket()  # a worker exits when its socket closes
        end = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.end(max(0.1, end - time.monotonic()))
        self._workers = []
        remove_scratch(self._rendezvous)

    # ------------------------------------------------------------ messages to and from the workers

    def _send_all(self, name: str, *args: Any) -> None:
        message = pickle.dumps((name, args), protocol=pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            self._send(worker, message)

    def _send(self, worker: WorkerProcess, message: bytes) -> None:
        try:
            worker.socket.send_bytes(message)
        except OSError as error:
            raise self._first_failure() from error

    def _ask(self, name: str, *args: Any) -> list[Any]:
        self._send_all(name, *args)
        return self._answers()

    def _answers(self) -> list[Any]:
        """Receive the answer of every worker."""
        return [self._receive(worker) for worker in self._workers]

    def _receive(self, worker: WorkerProcess) -> Any:
        """Receive the next message of a worker. Raises an error as soon as any worker has ended or failed."""
        while True:
            if worker.answers:
                return worker.answers.popleft()
            ready = wait([other.socket for other in self._workers])
            if any(other.socket in ready and other.has_exited() for other in self._workers if other is not worker):
                raise self._first_failure()
            if worker.socket in ready:
                try:
                    worker.receive()
                    continue
                except (WorkerFailed, EOFError, OSError):
                    raise self._first_failure() from None
            time.sleep(0.0005)  # another worker has answered, and its answer is read later

    def _first_failure(self) -> KvasirError:
        """Return the error of the worker that failed first. The first report may be that of a later failure."""
        end = time.monotonic() + REPORT_SECONDS
        failures = []
        for worker in sorted(self._workers, key=lambda worker: not worker.has_exited()):
            failures.append(worker.wait_for_failure(max(0.0, end - time.monotonic())))
            if failures[-1].when == -inf:  # it ended without a report, so it is the first; others may hang
                break
        return min(failures, key=lambda failure: failure.when).error

    def read_result(self, future: RemoteFuture) -> None:
        """Read results up to this one; they arrive in the order of the steps."""
        while future.value is None:
            self._futures[0].value = self._receive(self._workers[0])
            self._futures.popleft()

    def has_result(self) -> bool:
        """Whether the next result has arrived."""
        return bool(self._workers[0].answers) or self._workers[0].socket.poll()


def _sum(sizes: list[int | None]) -> int | None:
    """Sum of the sizes; None if one of them is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


class RemoteFuture:
    """A StepFuture for the result of rank 0."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self.value: StepResult | None = None

    def done(self) -> bool:
        return self.value is not None or self._executor.has_result()

    def result(self) -> StepResult:
        self._executor.read_result(self)
        assert self.value is not None, "read_result must set the value"
        return self.value
