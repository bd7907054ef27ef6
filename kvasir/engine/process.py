"""The engine's process, from its start to its end: settle the settings, build the core, serve, say why it failed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from kvasir.config.engine import EngineConfig
from kvasir.config.resolve import resolve
from kvasir.engine.build import build_core
from kvasir.engine.liveness import GRACE_SECONDS, Lifelines
from kvasir.engine.service import Service
from kvasir.engine.transport import Address, Progress, Start, as_one_sentence
from kvasir.errors import ConfigError, EngineError, KvasirError
from kvasir.log import get_logger
from kvasir.sampling.startup_processors import StartupProcessors
from kvasir.startup import note_entry
from kvasir.startup import seconds as startup_seconds

logger = get_logger(__name__)


def main(handle: int) -> None:
    """Serve whoever holds the other end of this socket, and whom it lets in."""
    # What a terminal or a service manager sends to all processes is for the owner to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_entry()
    owner = Connection(handle)
    try:
        start: Start = owner.recv()
    except (EOFError, OSError):
        return
    try:
        code = _serve(owner, start)
    finally:
        Address(start.directory, start.index).remove()
    os._exit(code)  # not by returning: what hangs in a library's exit handlers would keep the process


def _serve(owner: Connection, start: Start) -> int:
    address = Address(start.directory, start.index)
    lifelines = Lifelines(owner, start.owner, address)
    lifelines.start()  # from here on the owner's end is noticed, also while a model is fetched or loaded
    try:
        config = lifelines.config = resolve(start.asked)
        owner.send(("settled", config))
        startup = StartupProcessors(config.model.logits_processors)
        core = build_core(config, None if start.executor is None else _make_executor(start.executor, config))
    except BaseException as error:
        _say(lifelines, error, "the engine could not be started")
        return 1
    try:
        service = Service(core, startup, address.messages, lifelines, Progress(address.progress, create=True))
        gc.collect()
        gc.freeze()  # what is here now stays: later collections need not look at it
        lifelines.grace_seconds = GRACE_SECONDS
        lifelines.startup = dict(startup_seconds)
        owner.send(("ready", lifelines.startup))
        service.run()
        return 0
    except BaseException as error:
        _say(lifelines, error, "the engine failed")
        return 1
    finally:
        with suppress(Exception):
            core.close()


def _say(lifelines: Lifelines, error: BaseException, what: str) -> None:
    """Everybody is told, in one sentence; the traceback of what should not happen goes to the log."""
    if not isinstance(error, KvasirError) or isinstance(error, EngineError):
        logger.error("%s", what, exc_info=error)
    lifelines.tell_all(("failed", as_one_sentence(error, what)))


def _make_executor(executor: str | Callable[[EngineConfig], Any], config: EngineConfig) -> Any:
    if callable(executor):
        return executor(config)
    module, _, name = executor.partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"executor={executor!r} cannot be loaded ({error}); write it as 'module:name'.") from error
    return make(config)
