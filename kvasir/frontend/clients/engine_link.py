"""One engine process as a client sees it: requests to it, outputs from it, and whether it lives. API process."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

import zmq

from kvasir.config.engine import EngineConfig
from kvasir.engine import transport
from kvasir.engine.transport import Address, Progress, identity
from kvasir.errors import EngineDeadError, EngineError, KvasirError
from kvasir.messages import EngineOutput

Event = EngineOutput | transport.Refused | transport.Answer
_EXIT_SECONDS = 5.0  # for an engine that has closed its socket to be gone


class EngineLink:
    """`client`: the number this client has with the engine. `process` is the owner's alone."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: Address,
        client: int,
        lifeline: Connection,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.address = address
        self.client = client
        self.lifeline = lifeline
        self.process = process
        self.progress = Progress(address.progress)
        self._sent = (0.0, -1)  # when a request was sent, and how many steps there had been
        self.socket = context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity(client))
        self.socket.connect(address.messages)

    # ------------------------------------------------------------ to the engine

    def add(self, request: bytes, waits_already: bool) -> None:
        """As the codec writes it. `waits_already`: it is not the first of those that the engine has of ours now."""
        steps = self.progress.num_steps
        if not waits_already or self._sent[1] != steps:
            self._sent = time.monotonic(), steps
        self._send(transport.ADD, request)

    def abort(self, keys: list[tuple[int, int | None]]) -> None:
        self._send(transport.ABORT, transport.encode(keys))

    def ask(self, question: transport.Question) -> None:
        self._send(transport.ASK, transport.write(question))

    def _send(self, kind: bytes, data: bytes) -> None:
        self.socket.send_multipart([kind, data])

    # ------------------------------------------------------------ from the engine

    def receive(self) -> Iterator[Event]:
        """What has come, without waiting."""
        while True:
            try:
                kind, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield transport.decode_output(data) if kind == transport.OUTPUT else transport.read(data)

    def requests_of_others(self) -> int:
        """What other clients have running and waiting there."""
        return self.progress.requests_of_others(self.client)

    def unheeded_for(self) -> float:
        """Seconds since a request was sent to which no step has answered; 0 if one has."""
        sent, steps = self._sent
        return time.monotonic() - sent if steps == self.progress.num_steps else 0.0

    def death(self) -> KvasirError | None:
        """Why the engine ended; None while it lives. Does not wait."""
        try:
            while self.lifeline.poll():
                kind, value = self.lifeline.recv()
                if kind == "failed":
                    return _dead(value)
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
        self.lifeline.close()


class Introduction(NamedTuple):
    """What an engine that another process owns tells a new client."""

    number: int  # the client's
    config: EngineConfig
    startup: dict[str, float]  # seconds that each part of the engine's start took
    lifeline: Connection


def introduce(address: Address, client: int | None) -> Introduction:
    """Connect to an engine that another process owns."""
    try:
        lifeline = Client(address.lifeline, "AF_UNIX")
        lifeline.send(client)
        number, config, startup = lifeline.recv()
    except (EOFError, OSError) as error:
        raise EngineDeadError(f"no engine answers at {address.directory}: {error}") from error
    return Introduction(number, config, startup, lifeline)


def _dead(error: KvasirError) -> KvasirError:
    """An engine's last words, for those who have requests there."""
    return EngineDeadError(str(error)) if isinstance(error, EngineError) else error
