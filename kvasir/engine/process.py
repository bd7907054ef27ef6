"""The main function of an engine process: resolve settings, build the core, serve, report failures. Core process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from kvasir import log
from kvasir.config.engine import EngineConfig
from kvasir.config.resolve import resolve
from kvasir.config.startup import record_imports
from kvasir.config.startup import seconds as startup_seconds
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.engine.grammar_guide import GRAMMAR_GUIDE, GrammarGuides
from kvasir.engine.liveness import FAILED, GRACE_SECONDS, READY, RESOLVED, Address, ClientLiveness, EngineStart
from kvasir.engine.service import EngineService
from kvasir.engine.transport import Progress, portable_error
from kvasir.errors import ConfigError, EngineError, KvasirError
from kvasir.sampling.startup_processors import StartupProcessors

logger = log.get_logger(__name__)


def main(handle: int) -> None:
    """Serve the owner, which holds the other end of the socket with this descriptor, and clients that register."""
    # A terminal or a service manager signals all processes, but only the owner decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    record_imports()
    log.write_in_background()
    owner = Connection(handle)
    try:
        start: EngineStart = owner.recv()
    except (EOFError, OSError):
        return
    try:
        code = _serve(owner, start)
    finally:
        Address(start.directory, start.index).remove()
    log.flush()
    os._exit(code)  # instead of returning: a library's exit handler may hang


def _serve(owner: Connection, start: EngineStart) -> int:
    address = Address(start.directory, start.index)
    liveness = ClientLiveness(owner, start.owner, address)
    liveness.start()  # first, so that the engine also ends if its owner ends during a download
    try:
        config = liveness.config = resolve(start.asked)
        owner.send((RESOLVED, config))
        startup = StartupProcessors(config.model.logits_processors)
        guides = _GuidesLoader(config)  # beside the weights
        core = build_core(config, None if start.executor is None else _make_executor(start.executor, config))
        guides.register(core)
    except BaseException as error:
        _report(liveness, error, "the engine could not be started")
        return 1
    try:
        service = EngineService(core, startup, address.messages, liveness, Progress(address.progress, create=True))
        gc.collect()
        gc.freeze()  # these objects live as long as the process, so later collections skip them
        liveness.grace_seconds = GRACE_SECONDS
        liveness.startup_seconds = dict(startup_seconds)
        owner.send((READY, liveness.startup_seconds))
        service.run()
        return 0
    except BaseException as error:
        _report(liveness, error, "the engine failed")
        return 1
    finally:
        with suppress(Exception):
            core.close()


class _GuidesLoader:
    """Makes the guides for structured outputs in a thread: a large vocabulary takes seconds, and requests must not."""

    def __init__(self, config: EngineConfig) -> None:
        self._guides: GrammarGuides | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, args=(config,), name="grammar-tokenizer")
        self._thread.start()

    def _load(self, config: EngineConfig) -> None:
        from kvasir.frontend.requests.structured import grammar_guides

        try:
            guides = grammar_guides(config)
            if guides is not None:
                _ = guides.compiled.tokenizer
            self._guides = guides
        except Exception as error:
            self._error = error

    def register(self, core: EngineCore) -> None:
        self._thread.join()
        if self._error is not None:  # the API process refuses such requests, too
            logger.warning("There are no structured outputs: %s", self._error)
        if self._guides is not None:
            core.scheduler.guides.kinds[GRAMMAR_GUIDE] = self._guides


def _report(liveness: ClientLiveness, error: BaseException, what: str) -> None:
    """Send the error to all clients. Unless it is the user's, its traceback goes to the log."""
    if not isinstance(error, KvasirError) or isinstance(error, EngineError):
        logger.error("%s", what, exc_info=error)
    liveness.broadcast((FAILED, portable_error(error, what)))


def _make_executor(executor: str | Callable[[EngineConfig], Any], config: EngineConfig) -> Any:
    if callable(executor):
        return executor(config)
    module, _, name = executor.partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"executor={executor!r} cannot be loaded ({error}); write it as 'module:name'.") from error
    return make(config)
