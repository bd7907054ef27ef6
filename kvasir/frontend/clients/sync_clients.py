"""How LLMEngine reaches engine cores: one in its own process, or several in processes of their own. API process."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kvasir.config.engine import EngineConfig
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE
from kvasir.engine.stats import EngineStats
from kvasir.errors import KvasirError, RequestError
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.frontend.requests.structured import grammar_guides
from kvasir.messages import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from kvasir.frontend.clients.launch import ExecutorFactory

_POLL_MS = 100  # Ctrl-C is noticed between two polls


class SyncClient(Protocol):
    remote: bool  # requests go to another process, so they cannot carry Python callables

    def wait_ready(self) -> None:
        """Wait until requests are accepted."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. If the core refuses it, this raises; a remote core's refusal comes from `take_refused`."""

    def abort(self, key: int, num_kept: int | None = None) -> None: ...

    def step(self) -> EngineOutput:
        """Wait for the next output, which may be empty. Call it only while there is work."""

    def take_refused(self) -> list[tuple[int, KvasirError]]:
        """Keys of requests that the core has refused since the last call, with the reasons."""

    def has_work(self) -> bool: ...

    def reset_prefix_cache(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the core; of several cores, the first."""

    def close(self) -> None: ...


class InprocClient:
    """A core in the caller's process, which is simple and easy to debug."""

    remote = False

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore = build_core(config)
        if (guides := grammar_guides(config)) is not None:
            self.core.scheduler.guides.kinds[GRAMMAR_GUIDE] = guides

    def wait_ready(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        self.core.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> None:
        self.core.abort(key, num_kept)

    def step(self) -> EngineOutput:
        return self.core.run_step()

    def take_refused(self) -> list[tuple[int, KvasirError]]:
        return []

    def has_work(self) -> bool:
        return self.core.has_work()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def call(self, method: str, *args: Any) -> Any:
        function = None if method.startswith("_") else getattr(self.core, method, None)
        if not callable(function):
            raise RequestError(f"the core has no method {method!r}")
        return function(*args)

    def close(self) -> None:
        self.core.close()


class ProcessClient:
    """Engine processes that are polled by the caller's `step`."""

    remote = True

    def __init__(self, asked: EngineConfig, executor: ExecutorFactory = None) -> None:
        # Imported here: an engine in the caller's process needs neither ZeroMQ nor msgspec.
        from kvasir.frontend.clients.engine_client import EngineClient

        self.engines = EngineClient.start(asked, executor)
        self.engines.listener = self
        self.config = self.engines.config
        self._outputs: deque[EngineOutput] = deque()
        self._refused: list[tuple[int, KvasirError]] = []

    def wait_ready(self) -> None:
        self.engines.wait_ready()

    def add(self, request: EngineRequest) -> None:
        self.engines.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> None:
        self.engines.abort([(key, num_kept)])

    def has_work(self) -> bool:
        return bool(self._outputs or self._refused or self.engines.num_unfinished)

    def step(self) -> EngineOutput:
        if not (self._outputs or self._refused):
            self._receive()
        return self._outputs.popleft() if self._outputs else EngineOutput.empty()

    def take_refused(self) -> list[tuple[int, KvasirError]]:
        refused, self._refused = self._refused, []
        return refused

    def reset_prefix_cache(self) -> bool:
        return all(self._call_all("reset_prefix_cache"))

    def stats(self) -> EngineStats:
        return sum_stats(self._call_all("stats"))

    def call(self, method: str, *args: Any) -> Any:
        return self._result(self._start_call(0, method, args))

    def close(self) -> None:
        self.engines.close()

    # ------------------------------------------------------------ EngineListener

    def on_output(self, output: EngineOutput) -> None:
        self._outputs.append(output)

    def on_refusal(self, key: int, error: KvasirError) -> None:
        self._refused.append((key, error))

    def on_death(self, error: KvasirError) -> None:
        """Nothing is recorded here: `_receive` raises the error once all outputs are read."""

    # ------------------------------------------------------------ internals

    def _call_all(self, method: str) -> list[Any]:
        futures = [self._start_call(index, method, ()) for index in range(len(self.engines.connections))]
        return [self._result(future) for future in futures]

    def _start_call(self, index: int, method: str, args: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.engines.start_call(index, method, args, future)
        return future

    def _result(self, future: concurrent.futures.Future[Any]) -> Any:
        while not future.done():
            self._receive()
        return future.result()

    def _receive(self) -> None:
        """Wait a moment for messages. Raises EngineDeadError when an engine has ended and all its outputs are read."""
        if self.engines.poll(_POLL_MS):
            return
        self.engines.check_death()
        if not (self._outputs or self._refused):
            self.engines.check_alive()
