"""From the command line's arguments to a conversation."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

from rich.console import Console

from kvasir import env, starter
from kvasir.args import EngineArgs
from kvasir.chat.backend import Backend
from kvasir.chat.session import Session
from kvasir.chat.terminal import ask, talk
from kvasir.errors import ConfigError
from kvasir.log import get_logger


def start(namespace: argparse.Namespace) -> int:
    """The exit status."""
    console = Console()
    with console.status("getting ready") if console.is_terminal else nullcontext():
        backend = _remote(namespace) if namespace.url else _local(namespace)
    try:
        session = Session(backend, system=namespace.system)
        if namespace.quick is not None:
            return 0 if ask(session, console, namespace.quick, not namespace.plain) else 1
        return talk(session, console, not namespace.plain)
    finally:
        backend.close()


def _remote(namespace: argparse.Namespace) -> Backend:
    from kvasir.chat.remote import RemoteModel

    key = namespace.api_key or os.environ.get(env.API_KEY.name, "").partition(",")[0]
    return RemoteModel(namespace.url, key, namespace.model_name or getattr(namespace, "model", None))


def _local(namespace: argparse.Namespace) -> Backend:
    if namespace.api_key or namespace.model_name:
        raise ConfigError("--api-key and --model-name are for a server: add --url.")
    name = starter.NAME if starter.use_if_none_is_named(namespace) else None
    if env.LOG_LEVEL.name not in os.environ:
        get_logger("kvasir").setLevel("WARNING")  # the conversation is what people came for
        namespace.use_tqdm_on_load = getattr(namespace, "use_tqdm_on_load", False)
    args = EngineArgs.from_cli_args(namespace)
    from kvasir.chat.local import LocalModel  # brings the engine

    return LocalModel(args, name)
