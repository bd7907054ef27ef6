"""The engine processes behind one client: which of them gets a request, and what they all have to say. API process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import zmq

from kvasir.config.engine import EngineConfig
from kvasir.engine import transport
from kvasir.engine.transport import KEYS_PER_CLIENT, Address, make_directory, remove_directory
from kvasir.errors import ConfigError, EngineDeadError, EngineError, KvasirError, RequestError
from kvasir.frontend.clients.engine_link import EngineLink, Event, introduce
from kvasir.frontend.clients.launch import EngineProcess, Executor, close_all, launch, wait_for_all
from kvasir.frontend.clients.router import Router
from kvasir.messages import EngineOutput, EngineRequest


class Engines:
    """Made by `start` or `attach`. `config` is known at once; requests are taken after `wait`."""

    def __init__(self, config: EngineConfig, directory: str, processes: list[EngineProcess]) -> None:
        self.config = config
        self.directory = directory
        self.links: list[EngineLink] = []
        self.keys: Iterator[int] = itertools.count()  # for requests: in a range that is this client's alone
        self._processes = processes
        self._context: zmq.Context[Any] = zmq.Context()
        self.router = Router(config.parallel.data_parallel_size, config.cache.block_size)
        self._at: dict[int, int] = {}  # which engine has a request, by key
        self._num_at: Counter[int] = Counter()  # how many requests of ours an engine has
        self._forks: dict[int, list[int]] = {}  # keys of requests that fork from another, by its key
        self._numbers = itertools.count()
        self.dead: KvasirError | None = None
        self.startup: dict[str, float] = {}  # seconds that each part of the engines' start took, of the slowest

    @classmethod
    def start(cls, asked: EngineConfig, executor: Executor = None) -> Self:
        """Start the processes. Returns when the settings are settled; the model loads meanwhile."""
        size = asked.parallel.data_parallel_size
        directory = make_directory(size)
        processes: list[EngineProcess] = []
        try:
            processes = launch(asked, executor, directory)
            settled: list[EngineConfig] = wait_for_all(processes, "settled")
            _check_alike(settled)
        except BaseException:
            close_all(processes)
            remove_directory(directory, size)
            raise
        return cls(settled[0], directory, processes)

    @classmethod
    def attach(cls, directory: str) -> Self:
        """To engines that another process owns. They abort our requests when this process ends."""
        first = introduce(Address(directory, 0), None)
        number = first.number
        engines = cls(first.config, directory, [])
        known = [first]
        for index in range(1, first.config.parallel.data_parallel_size):
            known.append(introduce(Address(directory, index), number))
        for index, each in enumerate(known):
            engines.links.append(EngineLink(engines._context, Address(directory, index), number, each.lifeline))
            engines._note_startup(each.startup)
        engines.keys = itertools.count(number << KEYS_PER_CLIENT)
        return engines

    def wait(self) -> None:
        """Until all of them serve."""
        for seconds in wait_for_all(self._processes, "ready"):
            self._note_startup(seconds)
        for index, process in enumerate(self._processes):
            address = Address(self.directory, index)
            try:
                self.links.append(EngineLink(self._context, address, 0, process.lifeline, process.process))
            except OSError:  # it has removed what it had there
                raise EngineDeadError("the engine process ended as soon as it had started") from None

    def _note_startup(self, seconds: dict[str, float]) -> None:
        for name, took in seconds.items():
            self.startup[name] = max(took, self.startup.get(name, 0.0))

    # ------------------------------------------------------------ to the engines

    def add(self, request: EngineRequest, engine: int | None = None) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead
        if engine is not None:
            self._check_index("data_parallel_rank", engine)
        data = _encode(request)  # first: if it cannot be sent, nothing has changed
        index = self.router.route(request, [link.requests_of_others() for link in self.links], engine)
        forks = [fork.key for fork in request.forks]
        if forks:
            self._forks[request.key] = forks
        waits_already = self._num_at[index] > 0
        for key in (request.key, *forks):
            self._at[key] = index
        self._num_at[index] += 1 + len(forks)
        self.links[index].add(data, waits_already)

    def abort(self, keys: list[tuple[int, int | None]]) -> None:
        """(key, output tokens kept) each. Those that have ended are left alone."""
        by_engine: dict[int, list[tuple[int, int | None]]] = {}
        for key, num_kept in keys:
            index = self._forget(key)
            if index is not None:
                by_engine.setdefault(index, []).append((key, num_kept))
        for index, some in by_engine.items():
            self.links[index].abort(some)

    def ask(self, index: int, name: str, *args: Any) -> int:
        """Ask an engine's core; the Answer of this number comes among the events."""
        self._check_index("engine", index)
        number = next(self._numbers)
        self.links[index].ask(transport.Question(number, name, args))
        return number

    # ------------------------------------------------------------ from the engines

    @property
    def num_unfinished(self) -> int:
        return len(self._at)

    def receive(self, most: int | None = None) -> Iterator[Event]:
        """What has come, at most so much from each engine, without waiting."""
        for link in self.links:
            for event in itertools.islice(link.receive(), most):
                if isinstance(event, EngineOutput):
                    self._note(event)
                elif isinstance(event, transport.Refused):
                    for key in (event.key, *self._forks.get(event.key, ())):
                        self._forget(key)
                yield event

    def find_death(self) -> KvasirError | None:
        """Why one of the engines ended; then none takes requests any more."""
        for link in self.links:
            if self.dead is None:
                self.dead = link.death()
        return self.dead

    def check_progress(self, limit: float) -> None:
        """Raise if a step, or the wait of a request for one, takes longer than so many seconds."""
        for index, link in enumerate(self.links):
            which = f"engine {index}" if len(self.links) > 1 else "the engine"
            busy, unheeded = link.progress.busy_for(), link.unheeded_for() if self._num_at[index] else 0.0
            if busy > limit:
                raise EngineError(f"{which} has been in one step for {busy:.1f} s; stall_timeout={limit:g} allows less")
            if unheeded > limit:
                raise EngineError(
                    f"{which} has not taken up a request for {unheeded:.1f} s; stall_timeout={limit:g} allows less"
                )

    def close(self) -> None:
        for link in self.links:
            link.close()
        close_all(self._processes)
        remove_directory(self.directory, len(self._processes))
        self._context.term()

    def _check_index(self, name: str, index: object) -> None:
        if index not in range(len(self.links)):
            raise RequestError(f"{name}={index!r} is none of the {len(self.links)} engines, counted from 0", name)

    def _note(self, output: EngineOutput) -> None:
        for end in output.finished:
            self._forget(end.key)
        for beam in output.beams:
            if beam.finished:
                self._forget(beam.key)

    def _forget(self, key: int) -> int | None:
        """Which engine had it; None if it had ended before."""
        self._forks.pop(key, None)
        self.router.ended(key)
        index = self._at.pop(key, None)
        if index is not None:
            self._num_at[index] -= 1
        return index


def _encode(request: EngineRequest) -> bytes:
    try:
        return transport.encode(request)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"this request cannot be sent to the engine's process: {error}") from error


def _check_alike(settled: list[EngineConfig]) -> None:
    kinds = [config.device.device.partition(":")[0] for config in settled]
    if len(set(kinds)) > 1:
        needed = len(settled) * settled[0].parallel.tensor_parallel_size
        raise ConfigError(
            f"data_parallel_size={len(settled)} needs {needed} {kinds[0]} devices, and there are fewer; "
            f"lower it, or set device='cpu'"
        )
