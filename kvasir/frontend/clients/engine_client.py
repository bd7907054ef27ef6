"""EngineClient: one or several engine processes as one object. API process.

It sends requests, knows which engine has each of them, hands incoming messages to a listener and notices when an engine
process ends. AsyncLLM reads it from an event loop, ProcessClient by polling. It knows nothing of text.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

import zmq

from kvasir.config.engine import EngineConfig
from kvasir.engine import transport
from kvasir.engine.liveness import FAILED, READY, Address
from kvasir.engine.transport import KEYS_PER_CLIENT, Progress
from kvasir.errors import EngineDeadError, EngineError, KvasirError, RequestError
from kvasir.frontend.clients.launch import (
    EngineProcess,
    ExecutorFactory,
    register,
    start_engines,
    stop_engines,
    wait_for_all,
)
from kvasir.frontend.clients.router import Router
from kvasir.messages import EngineOutput, EngineRequest

CallFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]
_MESSAGES_PER_READ = 4  # per engine; then the tasks that read the outputs get their turn
_EXIT_SECONDS = 5.0  # how long to wait for the exit code of an engine that has closed its socket


class EngineListener(Protocol):
    def on_output(self, output: EngineOutput) -> None: ...

    def on_refusal(self, key: int, error: KvasirError) -> None:
        """The engine did not accept this request."""

    def on_death(self, error: KvasirError) -> None:
        """An engine process has ended; no request will get another output."""


class EngineClient:
    """Made by `start` or `attach`. `config` is known at once; requests are accepted after `wait_ready`.

    In an event loop it belongs to one loop at a time: the one it is first used in.
    """

    def __init__(self, config: EngineConfig, directory: str, processes: list[EngineProcess]) -> None:
        self.config = config
        self.directory = directory
        self.listener: EngineListener | None = None
        self.connections: list[EngineConnection] = []
        size = config.parallel.data_parallel_size
        self.router = Router(size, config.cache.block_size) if size > 1 else None
        self.keys: Iterator[int] = itertools.count()  # request keys, from a range that only this client uses
        self.startup_seconds: dict[str, float] = {}  # by startup phase, of the slowest engine
        self.dead: KvasirError | None = None  # why an engine ended
        self.closed = False
        self._processes = processes
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._engine_of: dict[int, int] = {}  # request key -> engine
        self._num_requests: Counter[int] = Counter()  # unfinished requests of this client by engine
        self._forks: dict[int, list[int]] = {}  # request key -> keys of the requests that fork from it
        self._calls: dict[int, CallFuture] = {}
        self._call_numbers = itertools.count()
        self._pings: dict[int, EngineConnection] = {}  # unanswered ones by their call numbers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_scheduled = False

    # ------------------------------------------------------------ start and end

    @classmethod
    def start(cls, asked: EngineConfig, executor: ExecutorFactory = None) -> Self:
        """Start the processes. Returns once their settings are resolved, while the model is still loading."""
        return cls(*start_engines(asked, executor))

    @classmethod
    def attach(cls, directory: str) -> Self:
        """Connect to engines that another process owns. They abort our requests when this process ends."""
        first, liveness = register(Address(directory, 0), None)
        client = cls(first.config, directory, [])
        client._connect(0, first.client, liveness)
        client._add_startup(first.startup_seconds)
        for index in range(1, first.config.parallel.data_parallel_size):
            other, liveness = register(Address(directory, index), first.client)
            client._connect(index, first.client, liveness)
            client._add_startup(other.startup_seconds)
        client.keys = itertools.count(first.client << KEYS_PER_CLIENT)
        return client

    def wait_ready(self) -> None:
        """Wait until every engine process of this owner accepts requests, then connect to it."""
        for seconds in wait_for_all(self._processes, READY):
            self._add_startup(seconds)
        for index, process in enumerate(self._processes):
            try:
                self._connect(index, 0, process.liveness, process.process)
            except OSError:  # the engine has removed its files
                raise EngineDeadError("the engine process ended as soon as it had started") from None

    def close(self) -> None:
        """Disconnect, and end the engine processes that this process owns. Requests and calls fail."""
        if self.closed:
            return
        self._fail(EngineDeadError("this engine was shut down"))
        self.closed = True
        for connection in self.connections:
            connection.close()
        stop_engines(self._processes, self.directory)
        self._context.term()

    def _connect(
        self, index: int, client: int, liveness: Connection, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        connection = EngineConnection(self._context, Address(self.directory, index), client, liveness, process)
        self.connections.append(connection)
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(liveness.fileno(), zmq.POLLIN)

    def _add_startup(self, seconds: dict[str, float]) -> None:
        for phase, took in seconds.items():
            self.startup_seconds[phase] = max(took, self.startup_seconds.get(phase, 0.0))

    # ------------------------------------------------------------ to the engines

    def add(self, request: EngineRequest, engine: int | None = None) -> None:
        """Send a request to the engine of this index, or to the one that the router chooses."""
        self.check_alive()
        if engine is not None:
            self._check_index("data_parallel_rank", engine)
        data = _encode(request)  # before anything is recorded: encoding may fail
        index = 0
        if self.router is not None:
            others = [connection.num_requests_of_others() for connection in self.connections]
            index = self.router.route(request, others, engine)
        forks = [fork.key for fork in request.forks]
        if forks:
            self._forks[request.key] = forks
        has_requests = self._num_requests[index] > 0
        for key in (request.key, *forks):
            self._engine_of[key] = index
        self._num_requests[index] += 1 + len(forks)
        self.connections[index].send_request(data, has_requests)
        self._schedule_read()

    def abort(self, keys: list[tuple[int, int | None]]) -> None:
        """Each key comes with the number of output tokens to keep. Keys of ended requests are ignored."""
        if self.closed or self.dead is not None:
            return
        by_engine: dict[int, list[tuple[int, int | None]]] = {}
        for key, num_kept in keys:
            index = self._forget(key)
            if index is not None:
                by_engine.setdefault(index, []).append((key, num_kept))
        for index, some in by_engine.items():
            self.connections[index].send_abort(some)
        self._schedule_read()

    def start_call(self, index: int, method: str, args: tuple[Any, ...], future: CallFuture) -> None:
        """Call a method of one engine's core. The result is set on the future when it arrives."""
        self.check_alive()
        self._check_index("engine", index)
        number = next(self._call_numbers)
        self.connections[index].send_call(transport.CoreCall(number, method, args))
        self._calls[number] = future
        self._schedule_read()

    async def call(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of one engine's core and return its result."""
        self.bind_event_loop()
        future = asyncio.get_running_loop().create_future()
        self.start_call(index, method, args, future)
        return await future

    def _check_index(self, name: str, index: object) -> None:
        count = len(self.connections)
        if index not in range(count):
            raise RequestError(f"{name}={index!r} does not exist: there are {count} engines, counted from 0", name)

    # ------------------------------------------------------------ from the engines

    @property
    def num_unfinished(self) -> int:
        return len(self._engine_of)

    def receive(self, limit: int | None = None) -> int:
        """Handle the messages that have arrived, up to `limit` of each engine. Returns how many there were."""
        count = 0
        for connection in self.connections:
            for kind, data in itertools.islice(connection.receive(), limit):
                self._handle(kind, data)
                count += 1
        return count

    def poll(self, timeout_ms: int) -> int:
        """Wait for messages and handle them. For callers without an event loop."""
        self._poller.poll(timeout_ms)
        return self.receive()

    def _handle(self, kind: bytes, data: bytes) -> None:
        if kind == transport.RESULT:
            self._finish_call(transport.decode_control(data))
            return
        assert self.listener is not None, "a client that sends requests needs a listener"
        if kind == transport.OUTPUT:
            output = transport.decode_output(data)
            self._forget_finished(output)
            self.listener.on_output(output)
        else:
            refusal: transport.RequestRefusal = transport.decode_control(data)
            for key in (refusal.key, *self._forks.get(refusal.key, ())):
                self._forget(key)
            self.listener.on_refusal(refusal.key, refusal.error)

    def _finish_call(self, result: transport.CoreResult) -> None:
        if (connection := self._pings.pop(result.number, None)) is not None:
            connection.pinged = None
            return
        future = self._calls.pop(result.number, None)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(result.error)
        else:
            future.set_result(result.value)

    def _forget_finished(self, output: EngineOutput) -> None:
        for finished in output.finished:
            self._forget(finished.key)
        for beam in output.beams:
            if beam.finished:
                self._forget(beam.key)

    def _forget(self, key: int) -> int | None:
        """Returns the engine that had the request; None if it had ended before."""
        self._forks.pop(key, None)
        if self.router is not None:
            self.router.remove(key)
        index = self._engine_of.pop(key, None)
        if index is not None:
            self._num_requests[index] -= 1
        return index

    # ------------------------------------------------------------ in an event loop

    def bind_event_loop(self) -> None:
        """Read the sockets in the running event loop from now on."""
        self.check_alive()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            if self.num_unfinished or self._calls:
                raise RequestError("this AsyncLLM has requests in another event loop; use it in one at a time")
            self._unbind_event_loop()
        self._loop, self._read_scheduled = loop, False
        for connection in self.connections:
            loop.add_reader(connection.socket.fileno(), self._read)
            loop.add_reader(connection.liveness.fileno(), self.check_death)

    def _unbind_event_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for connection in self.connections:
                loop.remove_reader(connection.socket.fileno())
                loop.remove_reader(connection.liveness.fileno())

    def _schedule_read(self) -> None:
        """ZeroMQ signals arrivals on a file descriptor only once, so the socket is read after each use of it."""
        if not self._read_scheduled and self._loop is not None and not self._loop.is_closed():
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self, limit: int | None = _MESSAGES_PER_READ) -> None:
        self._read_scheduled = False
        if self.closed:
            return
        try:
            if self.receive(limit):
                self._schedule_read()  # there may be more, but readers of these outputs run first
        except Exception as error:  # a lost output would leave its reader waiting for ever
            self._fail(EngineDeadError(f"an output could not be handled: {type(error).__name__}: {error}"))
            raise

    # ------------------------------------------------------------ health

    def check_alive(self) -> None:
        """Raise EngineDeadError if this client was closed or an engine is known to have ended."""
        if self.closed:
            raise EngineDeadError("this engine was shut down")
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead

    def check_death(self) -> KvasirError | None:
        """Look whether an engine has ended, and why. After that no engine accepts requests."""
        if self.dead is None and not self.closed:
            error = next((error for each in self.connections if (error := each.death()) is not None), None)
            if error is not None:
                self._read(limit=None)  # outputs that were sent before the end
                self._fail(error)
        return self.dead

    def _fail(self, error: KvasirError) -> None:
        if self.dead is not None:
            return
        self.dead = error
        self._unbind_event_loop()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        if self.listener is not None:
            self.listener.on_death(error)

    def ping(self) -> None:
        """Ask every engine for a sign of life, except those that still owe one. In an event loop."""
        self.bind_event_loop()
        for connection in self.connections:
            if connection.pinged is None:
                number = next(self._call_numbers)
                connection.pinged = time.monotonic()
                self._pings[number] = connection
                connection.send_call(transport.CoreCall(number, "has_work", ()))
        self._schedule_read()

    @property
    def seconds_unanswered(self) -> float:
        """How long the slowest engine has owed the answer to a ping; 0 if none does."""
        return max((connection.seconds_unanswered for connection in self.connections), default=0.0)

    def check_progress(self, limit: float, setting: str = "stall_timeout") -> None:
        """Raise EngineError if a step, a request's wait for its first step, or the answer to a ping takes longer than
        `limit` seconds, the value of `setting`."""
        self._read(limit=None)  # answers that have arrived while nothing read them
        for index, connection in enumerate(self.connections):
            name = f"engine {index}" if len(self.connections) > 1 else "the engine"
            allowed = f"{setting}={limit:g} allows less"
            step = connection.progress.seconds_in_step()
            if step > limit:
                raise EngineError(f"{name} has been in one step for {step:.1f} s; {allowed}")
            wait = connection.seconds_without_step() if self._num_requests[index] else 0.0
            if wait > limit:
                raise EngineError(f"{name} has not started on a request for {wait:.1f} s; {allowed}")
            silence = connection.seconds_unanswered
            if silence > limit:
                raise EngineError(f"{name} has not answered for {silence:.1f} s; {allowed}")


class EngineConnection:
    """The sockets to one engine process, and the memory page in which it reports progress.

    `client` is this client's number at the engine; `process` is set only in the process that owns the engine.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: Address,
        client: int,
        liveness: Connection,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.address = address
        self.client = client
        self.liveness = liveness
        self.process = process
        self.progress = Progress(address.progress)
        self.pinged: float | None = None  # when the ping was sent that is not answered yet
        self._last_sent = (0.0, -1)  # when a request was sent, and the number of steps until then
        self.socket = context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, transport.identity(client))
        self.socket.connect(address.messages)

    def send_request(self, request: bytes, has_requests: bool) -> None:
        """Send an encoded request. `has_requests`: the engine has other unfinished requests of this client."""
        steps = self.progress.num_steps
        if not has_requests or self._last_sent[1] != steps:
            self._last_sent = time.monotonic(), steps
        self._send(transport.ADD, request)

    def send_abort(self, keys: list[tuple[int, int | None]]) -> None:
        self._send(transport.ABORT, transport.encode(keys))

    def send_call(self, call: transport.CoreCall) -> None:
        self._send(transport.CALL, transport.encode_control(call))

    def _send(self, kind: bytes, data: bytes) -> None:
        self.socket.send_multipart([kind, data])

    def receive(self) -> Iterator[list[bytes]]:
        """The messages that have arrived, as (kind, data), without waiting."""
        while True:
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def num_requests_of_others(self) -> int:
        """Number of requests that other clients have at this engine."""
        return self.progress.num_requests_of_others(self.client)

    def seconds_without_step(self) -> float:
        """Seconds since a request was sent, if the engine has begun no step since; otherwise 0."""
        sent, steps = self._last_sent
        return time.monotonic() - sent if steps == self.progress.num_steps else 0.0

    @property
    def seconds_unanswered(self) -> float:
        return 0.0 if self.pinged is None else time.monotonic() - self.pinged

    def death(self) -> KvasirError | None:
        """Why the engine ended; None while it lives. Does not wait for it to end."""
        try:
            while self.liveness.poll():
                kind, value = self.liveness.recv()
                if kind == FAILED:
                    return EngineDeadError(str(value)) if isinstance(value, EngineError) else value
        except (EOFError, OSError):
            return EngineDeadError(f"the engine process ended{self._exit_code()}")
        return None

    def _exit_code(self) -> str:
        if self.process is None:
            return ""
        try:
            code = self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f": it was killed by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def close(self) -> None:
        self.socket.close()
        self.liveness.close()


def _encode(request: EngineRequest) -> bytes:
    try:
        return transport.encode(request)
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"this request cannot be sent to the engine's process: {error}") from error
