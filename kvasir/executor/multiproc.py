"""Several workers, a process each, that share the model: every one gets the same plan, rank 0 gives the answers.

A plan is pickled once and sent to all over socket pairs. A worker that ends, for whatever reason, closes its socket,
and that is what the core waits for beside the answer: a dead rank is an error at once, and closes the others.
One that dies makes the others fail in the collective they share with it, and theirs may be heard first: the error
is the one of the rank that ended first. A worker whose core is gone ends itself.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections import deque
from math import inf
from multiprocessing.connection import wait
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.errors import KvasirError
from kvasir.executor.rank import Rank, RankFailed
from kvasir.messages import DeviceMemory, KVSpec, SampleInputs, StepCosts, StepPlan, StepResult

CLOSE_SECONDS = 10.0  # for workers to end by themselves
BLAME_SECONDS = 2.0  # after a first sign of failure, for the other ranks to say what they know


class MultiprocExecutor:
    """See Executor."""

    def __init__(self, config: EngineConfig) -> None:
        self.overlaps = config.device.device != "cpu"
        self.size = config.parallel.tensor_parallel_size
        self._meeting = tempfile.TemporaryDirectory(prefix="kvasir-")
        self._ranks: list[Rank] = []
        self._waited: deque[RemoteFuture] = deque()  # results not read yet, oldest first
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
        return DeviceMemory(
            total=_sum([each.total for each in ranks]),
            weights=sum(each.weights for each in ranks),
            kv_cache=sum(each.kv_cache for each in ranks),
            largest_step=_sum([each.largest_step for each in ranks]),
            outside=_sum([each.outside for each in ranks]),
            graphs=sum(each.graphs for each in ranks),
            graphs_expected=sum(each.graphs_expected for each in ranks),
        )

    def execute(self, plan: StepPlan) -> None:
        self._tell("execute", plan)

    def sample(self, inputs: SampleInputs | None = None) -> RemoteFuture:
        self._tell("sample", inputs)
        result = RemoteFuture(self)
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
        failures = []
        for rank in sorted(self._ranks, key=lambda rank: not rank.ended()):
            failures.append(rank.last_words(max(0.0, end - time.monotonic())))
            if failures[-1].when == -inf:  # it ended without a word: nobody failed before it, and others may hang
                break
        return min(failures, key=lambda failure: failure.when).error

    def read_result(self, result: RemoteFuture) -> None:
        """Read answers up to this one: they come in the order in which they were asked for."""
        while result.value is None:
            self._waited[0].value = self._receive(self._ranks[0])
            self._waited.popleft()

    def result_is_there(self) -> bool:
        return self._ranks[0].socket.poll()


def _sum(sizes: list[int | None]) -> int | None:
    """None if one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


class RemoteFuture:
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
