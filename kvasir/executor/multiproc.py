"""Several workers, a process each, that share the model: every one gets the same plan, rank 0 gives the answers.

A plan is pickled once and sent to all over socket pairs. A worker that ends, for whatever reason, closes its socket,
and that is what the core waits for beside the answer: a dead rank is an error at once, and closes the others.
One that dies makes the others fail in the collective they share with it, and theirs may be heard first: the error
is the one of the rank that ended first. A worker whose core is gone ends itself.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any

from kvasir.config import EngineConfig
from kvasir.errors import EngineError, KvasirError
from kvasir.messages import DeviceMemory, KVSpec, StepCosts, StepPlan, StepResult
from kvasir.platforms.cpu_features import prepare_cpu

CLOSE_SECONDS = 10.0  # for workers to end by themselves
BLAME_SECONDS = 0.5  # after a first sign of failure, for the other ranks to say what they know
_SERVE = "import sys; from kvasir.executor.multiproc import serve; serve(int(sys.argv[1]))"


class MultiprocExecutor:
    """See Executor."""

    def __init__(self, config: EngineConfig) -> None:
        self.overlaps = config.device.device != "cpu"
        self.size = config.parallel.tensor_parallel_size
        self._meeting = tempfile.TemporaryDirectory(prefix="kvasir-")
        self._ranks: list[Rank] = []
        self._waited: deque[RemoteResult] = deque()  # results not read yet, oldest first
        try:
            for rank in range(self.size):
                self._ranks.append(Rank(rank, self.size))
                start = (config, rank, self.size, self._meeting.name)
                self._send(self._ranks[rank], pickle.dumps(("start", start)))
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
        costs: list[StepCosts] = self._ask("measure_costs")  # a step is done when the last rank is
        return StepCosts(max(c.copy_block for c in costs), max(c.compute_token for c in costs))

    def memory(self) -> DeviceMemory:
        """Of all ranks together."""
        ranks: list[DeviceMemory] = self._ask("memory")
        totals = [each.total for each in ranks if each.total is not None]
        return DeviceMemory(
            total=sum(totals) if len(totals) == len(ranks) else None,
            weights=sum(each.weights for each in ranks),
            kv_cache=sum(each.kv_cache for each in ranks),
        )

    def execute(self, plan: StepPlan) -> None:
        self._tell("execute", plan)

    def sample(self) -> RemoteResult:
        self._tell("sample")
        result = RemoteResult(self)
        self._waited.append(result)
        return result

    def close(self) -> None:
        for rank in self._ranks:
            rank.close_socket()  # which is how a worker learns that it is over
        end = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            rank.end(max(0.1, end - time.monotonic()))
        self._ranks = []
        self._meeting.cleanup()

    # ------------------------------------------------------------ talking to the ranks

    def _tell(self, name: str, *args: Any) -> None:
        message = pickle.dumps((name, args), protocol=pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: Rank, message: bytes) -> None:
        try:
            rank.socket.send_bytes(message)
        except OSError as error:
            raise self._first_failure() from error

    def _ask(self, name: str, *args: Any) -> list[Any]:
        self._tell(name, *args)
        return self._answers()

    def _answers(self) -> list[Any]:
        """What each rank answers to the last question."""
        return [self._receive(rank) for rank in self._ranks]

    def _receive(self, rank: Rank) -> Any:
        """The next message of a rank; an error as soon as any of them has ended or failed."""
        while True:
            ready = wait([other.socket for other in self._ranks])
            if any(other.socket in ready and other.ended() for other in self._ranks if other is not rank):
                raise self._first_failure()
            if rank.socket in ready:
                try:
                    return rank.receive()
                except (RankFailed, EOFError, OSError):
                    raise self._first_failure() from None
            time.sleep(0.0005)  # another rank has answered already and is not asked yet

    def _first_failure(self) -> KvasirError:
        """Why the ranks are failing: what the first of them died of, which may not be the first we heard from."""
        end = time.monotonic() + BLAME_SECONDS
        failures = [rank.last_words(max(0.0, end - time.monotonic())) for rank in self._ranks]
        return min(failures, key=lambda failure: failure.when).error

    def read_result(self, result: RemoteResult) -> None:
        """Read answers up to this one: they come in the order in which they were asked for."""
        while result.value is None:
            self._waited[0].value = self._receive(self._ranks[0])
            self._waited.popleft()

    def result_is_there(self) -> bool:
        return self._ranks[0].socket.poll()


class RankFailed(Exception):
    """A rank has said that it failed; its words are kept in the rank."""


@dataclass(frozen=True)
class Failure:
    """What a rank died of, and when on the machine's clock: at once if it could not say, never if it has not died."""

    when: float
    error: KvasirError


class RemoteResult:
    """A StepFuture whose result comes from rank 0."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self.value: StepResult | None = None

    def done(self) -> bool:
        return self.value is not None or self._executor.result_is_there()

    def result(self) -> StepResult:
        self._executor.read_result(self)
        assert self.value is not None, "reading answers ends with this one"
        return self.value


class Rank:
    """The core's end of one worker process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        # A fresh interpreter, told where to import from: no second run of the caller's script, no half-copied locks.
        paths = os.pathsep.join(path for path in sys.path if path)
        share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))}  # of the cores, unless told otherwise
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
        """Why it ended, if it ends within so many seconds."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self._failure or Failure(inf, EngineError(f"worker {self.rank} does not answer"))
        try:  # it may have said so itself
            while self._failure is None:
                kind, value = self.socket.recv()
                if kind == "error":
                    self._failure = self._told(value)
        except (EOFError, OSError):
            pass
        return self._failure or Failure(-inf, EngineError(f"worker {self.rank} ended (exit code {code})"))

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


# ---------------------------------------------------------------- in the worker's process


def serve(handle: int) -> None:
    """The worker's process: answers until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to us too; the core decides what it means
    _end_with_the_core()
    core = Connection(handle)
    try:
        _serve(core)
    except (EOFError, OSError):  # the core is gone, or done with us
        os._exit(0)
    except BaseException as error:
        # A KvasirError goes as it is: it may be a setting of the user's, refused on this rank.
        said = error if isinstance(error, KvasirError) else f"{type(error).__name__}: {error}"
        try:
            core.send(("error", (time.monotonic(), said)))
        finally:
            os._exit(1)  # not by returning: a collective that waits for a dead rank would not let us


def _serve(core: Connection) -> None:
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


def _next_message_comes_first(core: Connection, result: Any) -> bool:
    """Wait until the device is done or the core wants more of it; more work is started before results are sent."""
    while not result.done():
        if core.poll(0.0001):
            return True
    return core.poll()


def _start(config: EngineConfig, rank: int, size: int, meeting: str) -> Any:
    prepare_cpu()  # must come before torch
    mesh = import_module("kvasir.distributed.mesh").join(config.device.device, rank, size, f"{meeting}/store")
    if config.device.device != "cpu":
        config = replace(config, device=replace(config.device, device=f"{config.device.device.split(':')[0]}:{rank}"))
    return import_module("kvasir.worker.worker").Worker(config, mesh)


def _end_with_the_core() -> None:
    """The socket tells an idle worker that the core is gone; one inside a collective is told by this."""
    core = os.getppid()

    def watch() -> None:
        while os.getppid() == core:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
