"""Engine processes in an event loop: what they say is handed on as it comes. API process."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from kvasir.engine import transport
from kvasir.errors import EngineDeadError, KvasirError, RequestError
from kvasir.frontend.clients.engines import Engines
from kvasir.messages import EngineOutput, EngineRequest

_AT_ONCE = 4  # outputs of an engine that are taken before their readers run


class Listener(Protocol):
    def take(self, output: EngineOutput) -> None: ...

    def refuse(self, key: int, error: KvasirError) -> None: ...

    def die(self, error: KvasirError) -> None:
        """The engine has ended: everybody who waits must be told."""


class AsyncClient:
    """Belongs to one event loop at a time: the one it is first used in."""

    def __init__(self, engines: Engines, listener: Listener) -> None:
        self.engines = engines
        self.closed = False
        self._listener = listener
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looks = False  # a look at the sockets is due

    # ------------------------------------------------------------ to the engines

    def add(self, request: EngineRequest, engine: int | None = None) -> None:
        self.enter()
        self.engines.add(request, engine)
        self._look_soon()

    def abort(self, keys: list[tuple[int, int | None]]) -> None:
        if keys and self.engines.dead is None and not self.closed:
            self.engines.abort(keys)
            self._look_soon()

    async def call(self, index: int, name: str, *args: Any) -> Any:
        """A question to one engine's core."""
        self.enter()
        waiting = asyncio.get_running_loop().create_future()
        self._answers[self.engines.ask(index, name, *args)] = waiting
        self._look_soon()
        return await waiting

    def enter(self) -> None:
        """Before anything is asked: the engine must live, and this loop be the one that listens."""
        self.check_alive()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            if self.engines.num_unfinished or self._answers:
                raise RequestError("this AsyncLLM has requests in another event loop; use it in one at a time")
            self._leave()
        self._loop, self._looks = loop, False
        for link in self.engines.links:
            loop.add_reader(link.socket.fileno(), self._look)
            loop.add_reader(link.lifeline.fileno(), self.look_for_death)

    def check_alive(self) -> None:
        if self.closed:
            raise EngineDeadError("this engine was shut down")
        if self.engines.dead is not None:
            raise EngineDeadError(str(self.engines.dead)) from self.engines.dead

    # ------------------------------------------------------------ from the engines

    def look_for_death(self) -> None:
        error = self.engines.find_death()
        if error is not None and not self.closed:
            self._look()  # what it said before
            self.die(error)

    def die(self, error: KvasirError) -> None:
        self.engines.dead = self.engines.dead or error
        self._leave()
        answers, self._answers = self._answers, {}
        for waiting in answers.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(str(error)))
        self._listener.die(error)

    def close(self) -> None:
        """End the engines, if this process owns them."""
        self.die(EngineDeadError("this engine was shut down"))
        self.closed = True
        self.engines.close()

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for link in self.engines.links:
                loop.remove_reader(link.socket.fileno())
                loop.remove_reader(link.lifeline.fileno())

    def _look_soon(self) -> None:
        """A ZeroMQ socket tells of arrivals only once: after sending through it, it must be looked at."""
        if not self._looks and self._loop is not None:
            self._looks = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        if self.closed:
            return
        try:
            for event in self.engines.receive(_AT_ONCE):
                self._take(event)
                self._look_soon()  # there may be more, but those who wait for this come first
        except Exception as error:  # whoever waits for what was lost must not wait for ever
            self.die(EngineDeadError(f"an output could not be handled: {type(error).__name__}: {error}"))
            raise

    def _take(self, event: EngineOutput | transport.Refused | transport.Answer) -> None:
        if isinstance(event, EngineOutput):
            self._listener.take(event)
        elif isinstance(event, transport.Refused):
            self._listener.refuse(event.key, event.error)
        else:
            waiting = self._answers.pop(event.number, None)
            if waiting is None or waiting.done():
                return
            if event.error is not None:
                waiting.set_exception(event.error)
            else:
                waiting.set_result(event.value)
