"""The engine's loop in a process of its own: messages in, a step, outputs out. Core process.

Every client numbers its requests within a range of its own, so that keys never meet and a step's outputs are told apart
by arithmetic on one array.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import zmq

from kvasir.engine import transport
from kvasir.engine.core import EngineCore
from kvasir.engine.liveness import Lifelines
from kvasir.engine.transport import KEYS_PER_CLIENT, Progress, client_of, identity
from kvasir.errors import KvasirError, RequestError
from kvasir.log import get_logger
from kvasir.messages import EngineOutput, select_parts
from kvasir.sampling.startup_processors import StartupProcessors, with_processors

logger = get_logger(__name__)
_MOST_MESSAGES = 1024  # taken between two steps, so that a flood of requests does not stop those that run


class Service:
    def __init__(
        self,
        core: EngineCore,
        startup: StartupProcessors,
        endpoint: str,
        lifelines: Lifelines,
        progress: Progress,
    ) -> None:
        self.core = core
        self.startup = startup
        self.lifelines = lifelines
        self.progress = progress
        self._running: dict[int, set[int]] = {}  # keys by client
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # nothing may be dropped
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lifelines.wake, zmq.POLLIN)

    def run(self) -> None:
        """Until the owner is gone or done with the engine. What breaks a step is raised."""
        while not self.lifelines.over:
            self.turn()

    def turn(self) -> None:
        """Wait if there is nothing to do; take what has come; one step."""
        if not self.core.has_work():
            self.progress.rest()
            self._poller.poll()
            self.lifelines.hush()  # what woke us may have been seen before
        self._receive()
        if self.core.has_work():
            self.progress.step(self._running)
            self._send(self.core.run_step())

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    # ------------------------------------------------------------ what comes in

    def _receive(self) -> None:
        if self.lifelines.gone:
            self._abort_gone()
        for _ in range(_MOST_MESSAGES):
            if not self._socket.poll(0):  # half the time of a receive that fails
                return
            name, kind, data = self._socket.recv_multipart()
            client = client_of(name)
            if client not in self.lifelines.clients:  # it has left meanwhile
                continue
            try:
                self._handle(client, kind, data)
            except Exception:  # a message that makes no sense is not the end of all other requests
                logger.exception("A message of a client could not be handled")

    def _handle(self, client: int, kind: bytes, data: bytes) -> None:
        if kind == transport.ADD:
            self._add(client, data)
        elif kind == transport.ABORT:
            for key, num_kept in transport.decode_aborts(data):
                self.core.abort(key, num_kept)
                self._running.get(client, set()).discard(key)
        elif kind == transport.ASK:
            self._reply(client, transport.ANSWER, self._answer(transport.read(data)))

    def _add(self, client: int, data: bytes) -> None:
        try:
            request = transport.decode_request(data)
            assert request.key >> KEYS_PER_CLIENT == client, "a client keeps to its own range of keys"
            self.core.add(with_processors(request, self.startup))
        except Exception as error:  # one request's trouble is not the engine's
            self._refuse(client, transport.key_of(data), error)
        else:
            self._running.setdefault(client, set()).update((request.key, *(fork.key for fork in request.forks)))

    def _refuse(self, client: int, key: int | None, error: Exception) -> None:
        if not isinstance(error, KvasirError):
            logger.exception("A request could not be added")
        if key is None:
            return
        self.core.abort(key)
        refused = transport.Refused(key, transport.as_one_sentence(error, "the request could not be added"))
        self._reply(client, transport.REFUSED, transport.write(refused))

    def _answer(self, question: transport.Question) -> bytes:
        method = None if question.name.startswith("_") else getattr(self.core, question.name, None)
        try:
            if not callable(method):
                raise RequestError(f"the core has no method {question.name!r}")
            return transport.write(transport.Answer(question.number, method(*question.args)))
        except Exception as error:
            said = transport.as_one_sentence(error, f"{question.name} cannot be answered")
            return transport.write(transport.Answer(question.number, None, said))

    def _abort_gone(self) -> None:
        for client in self.lifelines.take_gone():
            keys = self._running.pop(client, set())
            self.progress.forget(client)
            for key in keys:
                self.core.abort(key)
            logger.info("A client has left; %d requests of its were aborted", len(keys))

    # ------------------------------------------------------------ what goes out

    def _send(self, output: EngineOutput) -> None:
        if is_empty(output):
            return
        self._forget_ended(output)
        if len(self._running) == 1:
            (client,) = self._running
            self._reply(client, transport.OUTPUT, transport.encode(output))
            return
        for client, part in split(output):
            self._reply(client, transport.OUTPUT, transport.encode(part))

    def _forget_ended(self, output: EngineOutput) -> None:
        ended = [end.key for end in output.finished]
        ended += [beam.key for beam in output.beams if beam.finished]
        for key in ended:
            self._running.get(key >> KEYS_PER_CLIENT, set()).discard(key)

    def _reply(self, client: int, kind: bytes, data: bytes) -> None:
        self._socket.send_multipart([identity(client), kind, data])


# ----------------------------------------------------------------
# A step's output, told apart by client. Core process.


def is_empty(output: EngineOutput) -> bool:
    return not (len(output.keys) or output.finished or output.beams or output.started)


def split(output: EngineOutput) -> Iterator[tuple[int, EngineOutput]]:
    """Each client's part of it. Work is per client, not per request, save for what ended."""
    of_line = output.keys >> KEYS_PER_CLIENT
    others = [one.key for group in (output.finished, output.beams, output.started) for one in group]
    clients = {*np.unique(of_line).tolist(), *(key >> KEYS_PER_CLIENT for key in others)}
    for client in sorted(clients):
        lines = np.flatnonzero(of_line == client)
        yield (
            client,
            EngineOutput(
                output.keys[lines],
                output.token_ids[lines],
                output.counts[lines],
                select_parts(output.parts, lines, len(output.keys)),
                [end for end in output.finished if end.key >> KEYS_PER_CLIENT == client],
                [beam for beam in output.beams if beam.key >> KEYS_PER_CLIENT == client],
                [start for start in output.started if start.key >> KEYS_PER_CLIENT == client],
            ),
        )
