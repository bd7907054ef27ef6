"""Executor of tensor parallelism: one worker process per rank. All get the same plan; rank 0 returns the results.

A plan is pickled once and sent to every worker over a socket pair. The core waits for answers and for closed sockets
at the same time, so the end of any worker is an error at once and ends the others. When a worker dies, the others fail
in their next collective and may report first; the error raised is that of the worker that failed first. Workers exit
when the core's process ends.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from math import inf
from multiprocessing.connection import wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.config.scratch import make_scratch, remove_scratch
from kvasir.errors import KvasirError
from kvasir.executor.worker_process import WorkerFailed, WorkerProcess
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

CLOSE_SECONDS = 10.0  # for workers to end before they are killed
REPORT_SECONDS = 2.0  # after a failure, for all workers to report theirs


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
