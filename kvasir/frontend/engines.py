"""The engine processes behind one client: which of them gets a request, and what they all have to say. API process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Self

import zmq

from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, EngineDeadError, EngineError, KvasirError
from kvasir.frontend.engine_launch import EngineProcess, Executor, close_all, launch
from kvasir.frontend.engine_link import EngineLink, Event, introduce
from kvasir.frontend.router import Router
from kvasir.messages import EngineOutput, EngineRequest
from kvasir.transport import words
from kvasir.transport.address import KEYS_PER_CLIENT, Address, make_directory


class Engines:
    """Made by `start` or `attach`. `config` is known at once; requests are taken after `wait`."""

    def __init__(self, config: EngineConfig, directory: str, processes: list[EngineProcess]) -> None:
        self.config = config
        self.directory = directory
        self.links: list[EngineLink] = []
        self.keys: Iterator[int] = itertools.count()  # for requests: in a range that is this client's alone
        self._processes = processes
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = Router(config.parallel.data_parallel_size, config.cache.block_size)
        self._at: dict[int, int] = {}  # which engine has a request, by key
        self._numbers = itertools.count()
        self.dead: KvasirError | None = None

    @classmethod
    def start(cls, asked: EngineConfig, executor: Executor = None) -> Self:
        """Start the processes. Returns when the settings are settled; the model loads meanwhile."""
        directory = make_directory()
        processes = launch(asked, executor, directory)
        try:
            settled: list[EngineConfig] = [process.wait_for("settled") for process in processes]
            _check_alike(settled)
        except BaseException:
            close_all(processes)
            Address(directory, 0).remove()
            raise
        return cls(settled[0], directory, processes)

    @classmethod
    def attach(cls, directory: str) -> Self:
        """To engines that another process owns. They abort our requests when this process ends."""
        number, config, lifeline = introduce(Address(directory, 0), None)
        engines = cls(config, directory, [])
        lifelines = [lifeline]
        for index in range(1, config.parallel.data_parallel_size):
            lifelines.append(introduce(Address(directory, index), number)[2])
        for index, each in enumerate(lifelines):
            engines.links.append(EngineLink(engines._context, Address(directory, index), number, each))
        engines.keys = itertools.count(number << KEYS_PER_CLIENT)
        return engines

    def wait(self) -> None:
        """Until all of them serve."""
        for index, process in enumerate(self._processes):
            process.wait_for("ready")
            address = Address(self.directory, index)
            self.links.append(EngineLink(self._context, address, 0, process.lifeline, process.process))

    # ------------------------------------------------------------ to the engines

    def add(self, request: EngineRequest, engine: int | None = None) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead
        index = self._router.choose(request) if engine is None else engine
        self._router.sent(request, index)
        for key in (request.key, *(fork.key for fork in request.forks)):
            self._at[key] = index
        self.links[index].add(request)

    def abort(self, keys: list[tuple[int, int | None]]) -> None:
        """(key, output tokens kept) each. Those that have ended are left alone."""
        by_engine: dict[int, list[tuple[int, int | None]]] = {}
        for key, num_kept in keys:
            index = self._at.pop(key, None)
            if index is not None:
                self._router.ended(key)
                by_engine.setdefault(index, []).append((key, num_kept))
        for index, some in by_engine.items():
            self.links[index].abort(some)

    def ask(self, index: int, name: str, *args: Any) -> int:
        """Ask an engine's core; the Answer of this number comes among the events."""
        number = next(self._numbers)
        self.links[index].ask(words.Question(number, name, args))
        return number

    # ------------------------------------------------------------ from the engines

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._at)

    def receive(self) -> Iterator[Event]:
        """What has come, without waiting."""
        for link in self.links:
            for event in link.receive():
                if isinstance(event, EngineOutput):
                    self._note(event)
                elif isinstance(event, words.Refused):
                    self._forget(event.key)
                yield event

    def find_death(self) -> KvasirError | None:
        """Why one of the engines ended; then none takes requests any more."""
        for link in self.links:
            if self.dead is None:
                self.dead = link.death()
        return self.dead

    def check_progress(self, limit: float) -> None:
        """Raise if a step takes longer than so many seconds."""
        for index, link in enumerate(self.links):
            busy = link.progress.busy_for()
            if busy > limit:
                which = f"engine {index}" if len(self.links) > 1 else "the engine"
                raise EngineError(f"{which} has been in one step for {busy:.1f} s; stall_timeout={limit:g} allows less")

    def close(self) -> None:
        for link in self.links:
            link.close()
        close_all(self._processes)
        for index in range(len(self._processes)):
            Address(self.directory, index).remove()
        self._context.term()

    def _note(self, output: EngineOutput) -> None:
        for end in output.finished:
            self._forget(end.key)
        for beam in output.beams:
            if beam.finished:
                self._forget(beam.key)

    def _forget(self, key: int) -> None:
        if self._at.pop(key, None) is not None:
            self._router.ended(key)


def _check_alike(settled: list[EngineConfig]) -> None:
    kinds = [config.device.device.partition(":")[0] for config in settled]
    if len(set(kinds)) > 1:
        needed = len(settled) * settled[0].parallel.tensor_parallel_size
        raise ConfigError(
            f"data_parallel_size={len(settled)} needs {needed} {kinds[0]} devices, and there are fewer; "
            f"lower it, or set device='cpu'"
        )
