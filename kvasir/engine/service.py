"""EngineService: the loop of an engine process. It receives messages, runs a step and sends the outputs. Core process.

Every client takes its request keys from its own range, so keys never collide, and one shift of the array of keys tells
which client each output belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import zmq
from numpy.typing import NDArray

from kvasir.engine import transport
from kvasir.engine.core import EngineCore
from kvasir.engine.liveness import ClientLiveness
from kvasir.engine.transport import KEYS_PER_CLIENT, Progress, client_of, identity
from kvasir.errors import KvasirError, RequestError
from kvasir.log import get_logger
from kvasir.messages import EngineOutput, select_parts
from kvasir.sampling.startup_processors import StartupProcessors, with_processors

logger = get_logger(__name__)
_MAX_MESSAGES_PER_STEP = 1024  # so that a flood of new requests does not stall the running ones


class EngineService:
    def __init__(
        self,
        core: EngineCore,
        startup: StartupProcessors,
        endpoint: str,
        liveness: ClientLiveness,
        progress: Progress,
    ) -> None:
        self.core = core
        self.startup = startup
        self.liveness = liveness
        self.progress = progress
        self._running: dict[int, set[int]] = {}  # client -> keys of its unfinished requests
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # no limit: messages are never dropped
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(liveness.wake, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the owner ends. A failed step raises."""
        while not self.liveness.owner_ended:
            self.run_once()

    def run_once(self) -> None:
        """Wait if there is no work, handle the messages that have arrived and run one step."""
        if not self.core.has_work():
            self.progress.set_idle()
            if any(source is not self._socket for source, _ in self._poller.poll()):
                self.liveness.clear_wake()  # the change it signals may be handled already
        self._receive()
        while (left := int(1e3 * self.core.seconds_to_wait())) > 0 and self._socket.poll(left):
            self._receive()
        if self.core.has_work():
            self.progress.begin_step(self._running)
            self._send(self.core.run_step())

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    # ------------------------------------------------------------ from clients

    def _receive(self) -> None:
        if self.liveness.departed:
            self._abort_departed()
        for _ in range(_MAX_MESSAGES_PER_STEP):
            if not self._socket.poll(0):  # takes half the time of a receive that fails
                return
            name, kind, data = self._socket.recv_multipart()
            client = client_of(name)
            if client not in self.liveness.clients:  # it has ended meanwhile
                continue
            try:
                self._handle(client, kind, data)
            except Exception:  # an invalid message must not end the other requests
                logger.exception("A client's message could not be handled")

    def _handle(self, client: int, kind: bytes, data: bytes) -> None:
        if kind == transport.ADD:
            self._add(client, data)
        elif kind == transport.ABORT:
            for key, num_kept in transport.decode_aborts(data):
                self.core.abort(key, num_kept)
                self._running.get(client, set()).discard(key)
        elif kind == transport.CALL:
            self._reply(client, transport.RESULT, self._call(transport.decode_control(data)))

    def _add(self, client: int, data: bytes) -> None:
        try:
            request = transport.decode_request(data)
            assert request.key >> KEYS_PER_CLIENT == client, "the key is not in the client's range"
            if request.sampling.extras is not None:
                request = with_processors(request, self.startup)
            self.core.add(request)
        except Exception as error:  # a bad request must not end the engine
            self._refuse(client, transport.key_of(data), error)
        else:
            self._running.setdefault(client, set()).update((request.key, *(fork.key for fork in request.forks)))

    def _refuse(self, client: int, key: int | None, error: Exception) -> None:
        if not isinstance(error, KvasirError):
            logger.exception("A request could not be added")
        if key is None:
            return
        self.core.abort(key)
        refusal = transport.RequestRefusal(key, transport.portable_error(error, "the request could not be added"))
        self._reply(client, transport.REFUSAL, transport.encode_control(refusal))

    def _call(self, call: transport.CoreCall) -> bytes:
        method = None if call.method.startswith("_") else getattr(self.core, call.method, None)
        try:
            if not callable(method):
                raise RequestError(f"the core has no method {call.method!r}")
            return transport.encode_control(transport.CoreResult(call.number, method(*call.args)))
        except Exception as error:
            portable = transport.portable_error(error, f"the call of {call.method} failed")
            return transport.encode_control(transport.CoreResult(call.number, None, portable))

    def _abort_departed(self) -> None:
        for client in self.liveness.take_departed():
            keys = self._running.pop(client, set())
            self.progress.remove_client(client)
            for key in keys:
                self.core.abort(key)
            logger.info("A client has ended; its %d requests were aborted", len(keys))

    # ------------------------------------------------------------ to clients

    def _send(self, output: EngineOutput) -> None:
        if is_empty(output):
            return
        try:
            self._forget_finished(output)
            if len(self._running) == 1:
                (client,) = self._running
                parts: Iterable[tuple[int, EngineOutput]] = [(client, output)]
            else:
                parts = list(split(output))
        except Exception:  # a fault in the reply to one request must not end the others
            logger.exception("A step's output could not be divided among the clients")
            self._send_one_by_one(output)
            return
        for client, part in parts:
            try:
                self._reply(client, transport.OUTPUT, transport.encode(part))
            except Exception:
                logger.exception("A step's output could not be sent")
                self._send_one_by_one(part)

    def _send_one_by_one(self, output: EngineOutput) -> None:
        """Send each request's part of an output that cannot be sent as a whole. A request whose part cannot be sent
        fails alone."""
        for key in keys_in(output):
            try:
                part = select(output, key)
                self._forget_finished(part)
                self._reply(key >> KEYS_PER_CLIENT, transport.OUTPUT, transport.encode(part))
            except Exception as error:
                logger.exception("The reply to the request with key %r could not be sent, so it fails", key)
                self._fail_request(key, error)

    def _fail_request(self, key: int, error: Exception) -> None:
        client = key >> KEYS_PER_CLIENT
        if client not in self._running:  # nobody waits for it
            return
        self.core.abort(key)
        self._running[client].discard(key)
        refusal = transport.RequestRefusal(key, transport.portable_error(error, "the reply could not be sent"))
        self._reply(client, transport.REFUSAL, transport.encode_control(refusal))

    def _forget_finished(self, output: EngineOutput) -> None:
        ended = [end.key for end in output.finished]
        ended += [beam.key for beam in output.beams if beam.finished]
        for key in ended:
            self._running.get(key >> KEYS_PER_CLIENT, set()).discard(key)

    def _reply(self, client: int, kind: bytes, data: bytes) -> None:
        self._socket.send_multipart([identity(client), kind, data])


# ---------------------------------------------------------------- the output of a step, by client


def is_empty(output: EngineOutput) -> bool:
    return not (len(output.keys) or output.finished or output.beams or output.started)


def keys_in(output: EngineOutput) -> list[int]:
    """The keys of all requests that an output speaks of."""
    others = [one.key for group in (output.started, output.finished, output.beams) for one in group]
    return list(dict.fromkeys([*output.keys.tolist(), *others]))


def split(output: EngineOutput) -> Iterator[tuple[int, EngineOutput]]:
    """Each client's part of the output. The cost is per client, and per request only for those that ended."""
    clients = output.keys >> KEYS_PER_CLIENT
    others = [one.key for group in (output.finished, output.beams, output.started) for one in group]
    for client in sorted({*np.unique(clients).tolist(), *(key >> KEYS_PER_CLIENT for key in others)}):
        own = range(client << KEYS_PER_CLIENT, client + 1 << KEYS_PER_CLIENT)
        yield client, _part(output, np.flatnonzero(clients == client), own)


def select(output: EngineOutput, key: int) -> EngineOutput:
    """One request's part of the output."""
    return _part(output, np.flatnonzero(output.keys == key), range(key, key + 1))


def _part(output: EngineOutput, lines: NDArray[np.int64], keys: range) -> EngineOutput:
    return EngineOutput(
        output.keys[lines],
        output.token_ids[lines],
        output.counts[lines],
        select_parts(output.parts, lines, len(output.keys)),
        [end for end in output.finished if end.key in keys],
        [beam for beam in output.beams if beam.key in keys],
        [start for start in output.started if start.key in keys],
    )
