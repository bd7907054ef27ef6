"""Runs a server until it gets a signal: in this process, or in several API processes in front of one engine.

With several, this process owns the engine and the socket, and they accept from it. Each is a fresh interpreter with its
own client of the engine. If one ends unasked, all are ended, so that a service manager restarts the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from kvasir import log
from kvasir.config import env
from kvasir.config.args import flags_of, with_flags
from kvasir.config.engine import EngineConfig, all_settings
from kvasir.config.env import LOG_FORMAT
from kvasir.config.scratch import make_scratch, remove_scratch
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import ConfigError, EngineError
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.log import get_logger
from kvasir.models import hub
from kvasir.server.api_keys import load_keys
from kvasir.server.app import make_app
from kvasir.server.config import ServerConfig, server_settings
from kvasir.server.large_bodies import bound_logprobs
from kvasir.server.lifecycle import Peers, ServerLifecycle, Starter, one_line
from kvasir.server.metrics import MULTIPROCESS
from kvasir.server.protocol import SWEEP_TICKS, Connections, HttpProtocol, WebSocketProtocol, raise_descriptor_limit
from kvasir.server.state import ServerPhase, ServerState
from kvasir.server.tracing import Tracer

logger = get_logger(__name__)

_CLOSE_SECONDS = 5  # for open connections to close, once no request runs
# Of the queue, unless they are set: far more than clients wait for, and what the memory for their prompts allows.
MAX_QUEUED_REQUESTS = 8192
MAX_QUEUED_TOKENS = 1 << 25
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(asked: EngineConfig, config: ServerConfig, executor: Any = None) -> int:
    """Serve until a signal. Returns the exit status: 0 after a drain, 1 if the engine died.

    Settings that cannot work raise a ConfigError. `executor` replaces the model's, as in AsyncLLM.
    """
    if not asked.model.path:  # its settings are not resolved, so nothing has looked for the model
        hub.check_at_once(asked.model)
    set_up_logging(config)
    raise_descriptor_limit()
    # Half of the cores tokenize long texts; the others stay free for HTTP and the engine.
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    asked = replace(asked, scheduler=asked.scheduler.with_queue_limits(MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # until there is a server to drain
    if config.api_server_count > 1:
        return supervise(asked, config, executor)
    state = ServerState(config, asked.model.model)  # first, because the files it reads may be wrong
    sock = listen(config)

    def start(phase: ServerPhase) -> AsyncLLM:
        client = EngineClient.start(asked, executor)
        phase.enter("model")
        return AsyncLLM(client.config, client=client)

    return run(state, start, sock)


def run(state: ServerState, start: Starter, sock: socket.socket, owns_socket: bool = True) -> int:
    """Serve on a socket until the end, then shut the engine down.

    `owns_socket`: no other process serves on it, so this one removes it and prints the error.
    """
    if state.config.otlp_traces_endpoint is not None:
        state.tracer = Tracer(state.config.otlp_traces_endpoint)
    pool = Connections(state.config, state.body_memory, state.metrics.failed)
    server = Server(_uvicorn_config(state, pool), pool, state)
    lifecycle = ServerLifecycle(state, start, server.stop)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(server, lifecycle, sock))
    finally:
        if state.tracer is not None:
            state.tracer.close()
        if (engine := state.engine_or_none) is not None:
            engine.shutdown()
        if state.config.uds is not None and owns_socket:
            Path(state.config.uds).unlink(missing_ok=True)
        log.flush()
    if lifecycle.error is None:
        return 0
    if not owns_socket:
        return 1
    if isinstance(lifecycle.error, ConfigError):
        raise lifecycle.error
    print_error(one_line(lifecycle.error))
    return 1


def print_error(message: str) -> None:
    """Print why the server ended, with flags in place of Python's names: the reader has started it by a command."""
    flags = flags_of({**all_settings(), **server_settings()})
    log.print_last(f"kvasir: error: {with_flags(message, flags)}")


async def _serve(server: Server, lifecycle: ServerLifecycle, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.drain)
    lifecycle.begin()
    await server.serve(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening before the drain, and with limits."""

    def __init__(self, config: uvicorn.Config, pool: Connections, state: ServerState) -> None:
        super().__init__(config)
        self.pool = pool
        self.state = state

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self.pool.sweep(self.server_state.connections)
            await bound_logprobs(self.state)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.should_exit = True


def _uvicorn_config(state: ServerState, pool: Connections) -> uvicorn.Config:
    config = state.config
    return uvicorn.Config(
        make_app(state),
        http=partial(HttpProtocol, pool=pool),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, pool=pool),  # type: ignore[arg-type]
        ws_max_size=config.max_request_bytes,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=math.ceil(config.keep_alive_timeout),
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "TLSv1",
    )


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def listen(config: ServerConfig) -> socket.socket:
    """Open the socket before anything slow starts, so that an address in use is an error at once."""
    for file in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"The TLS file {file} cannot be read.")
    sock = _listen_on_file(config.uds) if config.uds is not None else _listen_on_port(config.host, config.port)
    sock.setblocking(False)
    _log_address(config, sock)
    return sock


def _listen_on_file(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket() and not _answers(path):
            os.unlink(path)  # a server that was killed has left it
        sock.bind(path)
    except OSError as error:
        sock.close()
        why = os.strerror(error.errno) if error.errno else "the path is too long"
        raise ConfigError(f"Cannot listen on {path}: {why}. Set another --uds.") from error
    sock.listen(2048)
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return False
        return True


def _listen_on_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Names that do not resolve have error numbers below zero.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else "the name cannot be resolved"
        raise ConfigError(f"Cannot listen on {host}:{port}: {why}. Set another --port or --host.") from error


def _log_address(config: ServerConfig, sock: socket.socket) -> None:
    if config.uds is not None:
        logger.info("listening on %s", config.uds)
        return
    host, port = sock.getsockname()[:2]
    where = f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("listening on %s", where)
    page = where.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    logger.info("playground at %s/, engine view at %s/engine", page, page)
    open_to_all = config.host not in _LOCAL
    if open_to_all and not config.api_key and not config.api_key_file and not env.API_KEY.read_text():
        logger.warning("everyone who can reach %s may use this server: set --api-key, or --host 127.0.0.1", where)


def set_up_logging(config: ServerConfig) -> None:
    if config.log_format != "text":
        os.environ[LOG_FORMAT.name] = config.log_format.upper()  # the engine's process reads it too
        log.configure()
    log.write_in_background()
    logging.getLogger("uvicorn").setLevel(config.uvicorn_log_level.upper())


# ------------------------------------------------------------ several API processes

_MAIN = "import sys; from kvasir.server.launch import api_process; api_process(int(sys.argv[1]))"
_WATCH_SECONDS = 0.1
_KILL_SECONDS = 15.0  # beyond the drain's limit, until a process is killed


@dataclass(slots=True)
class _Start:
    """The first message to an API process."""

    config: ServerConfig
    model: str
    socket: int


class _Stopped(BaseException):
    """SIGTERM or SIGINT came while the engine started."""


def supervise(asked: EngineConfig, config: ServerConfig, executor: Any = None) -> int:
    load_keys(config)  # reports wrong keys once, instead of in every process
    sock = listen(config)
    directory = make_scratch("metrics-")
    start = _Start(config, asked.model.model, sock.fileno())
    processes = _ApiProcesses([_ApiProcess(start, directory) for _ in range(config.api_server_count)])
    try:
        return processes.run(asked, executor, config.shutdown_timeout)
    finally:
        processes.kill()
        sock.close()
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)
        remove_scratch(directory)
        if processes.error:
            print_error(processes.error)


class _ApiProcess:
    def __init__(self, start: _Start, metrics: str) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), start.socket],
            env={**os.environ, "PYTHONPATH": paths, MULTIPROCESS: metrics},
            start_new_session=True,  # this process passes Ctrl-C on
        )
        theirs.close()
        self.link = Connection(ours.detach())
        self.link.send(start)

    def send(self, word: str, value: Any) -> None:
        try:
            self.link.send((word, value))
        except OSError:
            logger.warning("an API process has ended early")


class _ApiProcesses:
    def __init__(self, children: list[_ApiProcess]) -> None:
        self.children = children
        self.stopping = False
        self.error = ""  # why it ended, unless by a signal

    def run(self, asked: EngineConfig, executor: Any, limit: float) -> int:
        engines: EngineClient | None = None
        self._on_signals(self._interrupt_start)
        try:
            engines = EngineClient.start(asked, executor)
            self._send_all("phase", "model")
            engines.wait_ready()
            self._on_signals(self._pass_on)
            self._send_all("engine", engines.directory)
            return self._wait(engines, limit)
        except _Stopped:
            return 0
        except Exception as error:
            self._send_all("failed", EngineError(one_line(error)))
            raise
        finally:
            if engines is not None:
                engines.close()

    def _wait(self, engines: EngineClient, limit: float) -> int:
        """Wait until all processes have ended after a signal, or until one ends without a signal."""
        until = None
        while True:
            codes = [child.process.poll() for child in self.children]
            if all(code is not None for code in codes) and self.stopping:
                return 0 if not any(codes) else 1
            if not self.stopping and any(code is not None for code in codes):
                cause = engines.check_death()
                self.error = "an API process ended unasked" if cause is None else one_line(cause)
                return 1
            if self.stopping:
                until = until or time.monotonic() + limit + _KILL_SECONDS
                if time.monotonic() > until:
                    return 1
            time.sleep(_WATCH_SECONDS)

    # ------------------------------------------------------------ signals

    def _on_signals(self, handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    def _interrupt_start(self, number: int, frame: FrameType | None) -> None:
        raise _Stopped

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)

    def _send_all(self, word: str, value: Any) -> None:
        for child in self.children:
            child.send(word, value)

    def kill(self) -> None:
        """End the processes that still run, by SIGTERM and then by SIGKILL."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def api_process(handle: int) -> None:
    """The main function of an API process. `handle` is its connection to the supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(handle)
    start: _Start = link.recv()
    set_up_logging(start.config)
    state = ServerState(start.config, start.model, start.config.api_server_count)
    state.peers = Peers(os.environ[MULTIPROCESS], start.config.api_server_count)

    def attach(phase: ServerPhase) -> AsyncLLM:
        while True:
            word, value = link.recv()
            if word == "failed":
                raise value
            if word == "engine":
                return AsyncLLM.attach(value)
            phase.enter(value)

    sys.exit(run(state, attach, socket.socket(fileno=start.socket), owns_socket=False))
