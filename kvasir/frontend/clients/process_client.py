"""Engine processes for callers without an event loop: LLM and LLMEngine. API process."""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq

from kvasir.config.engine import EngineConfig
from kvasir.engine import transport
from kvasir.errors import EngineDeadError, KvasirError
from kvasir.frontend.clients.engines import Engines
from kvasir.frontend.clients.launch import Executor
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.messages import EngineOutput, EngineRequest, EngineStats

_POLL_MS = 100  # an interrupt is noticed between two waits


class ProcessClient:
    """See EngineClient."""

    remote = True

    def __init__(self, asked: EngineConfig, executor: Executor = None) -> None:
        self.engines = Engines.start(asked, executor)
        self.config = self.engines.config
        self._outputs: deque[EngineOutput] = deque()
        self._refused: list[tuple[int, KvasirError]] = []
        self._answers: dict[int, transport.Answer] = {}
        self._poller = zmq.Poller()

    def wait(self) -> None:
        self.engines.wait()
        for link in self.engines.links:
            self._poller.register(link.socket, zmq.POLLIN)
            self._poller.register(link.lifeline.fileno(), zmq.POLLIN)

    def add(self, request: EngineRequest) -> None:
        self.engines.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> None:
        if self.engines.dead is None:
            self.engines.abort([(key, num_kept)])

    def has_work(self) -> bool:
        return bool(self._outputs or self._refused or self.engines.num_unfinished)

    def step(self) -> EngineOutput:
        if not (self._outputs or self._refused):
            self._receive()
        return self._outputs.popleft() if self._outputs else EngineOutput.empty()

    def refused(self) -> list[tuple[int, KvasirError]]:
        refused, self._refused = self._refused, []
        return refused

    def reset_prefix_cache(self) -> bool:
        return all(self._call_all("reset_prefix_cache"))

    def stats(self) -> EngineStats:
        return sum_stats(self._call_all("stats"))

    def call(self, name: str, *args: Any) -> Any:
        return self._answer(self._ask(0, name, *args))

    def close(self) -> None:
        self.engines.close()

    def _call_all(self, name: str) -> list[Any]:
        return [self._answer(number) for number in [self._ask(i, name) for i in range(len(self.engines.links))]]

    def _ask(self, index: int, name: str, *args: Any) -> int:
        if self.engines.dead is not None:
            raise EngineDeadError(str(self.engines.dead)) from self.engines.dead
        return self.engines.ask(index, name, *args)

    def _answer(self, number: int) -> Any:
        while number not in self._answers:
            self._receive()
        answer = self._answers.pop(number)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _receive(self) -> None:
        """Wait for something to come, but not for long. A dead engine is an error, once all it said is read."""
        self._poller.poll(_POLL_MS)
        found = False
        for event in self.engines.receive():
            found = True
            if isinstance(event, EngineOutput):
                self._outputs.append(event)
            elif isinstance(event, transport.Refused):
                self._refused.append((event.key, event.error))
            else:
                self._answers[event.number] = event
        if not found and (error := self.engines.find_death()) is not None:
            raise EngineDeadError(str(error)) from error
