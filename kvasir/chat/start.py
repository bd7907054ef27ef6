"""From the command line's arguments to a conversation."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from kvasir import env, starter
from kvasir.args import EngineArgs
from kvasir.chat.backend import Backend
from kvasir.chat.session import Session
from kvasir.chat.terminal import ask, talk
from kvasir.errors import ConfigError
from kvasir.log import get_logger


def start(namespace: argparse.Namespace, params: dict[str, Any], key: str | None) -> int:
    """The exit status. `key`: the server's."""
    console = Console()
    with console.status("getting ready") if console.is_terminal else nullcontext():
        backend = _remote(namespace, key) if namespace.url else _local(namespace)
    try:
        session = Session(backend, system=namespace.system, params=params)
        if namespace.quick is not None:
            return ask(session, console, namespace.quick, not namespace.plain)
        return talk(session, console, not namespace.plain)
    finally:
        backend.close()


def _remote(namespace: argparse.Namespace, key: str | None) -> Backend:
    from kvasir.chat.remote import RemoteModel

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
