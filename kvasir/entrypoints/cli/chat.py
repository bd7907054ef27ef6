"""`kvasir chat`: flags in, a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from kvasir.config import env
from kvasir.config.args import EngineArgs
from kvasir.entrypoints.cli.chat_backend import Backend
from kvasir.entrypoints.cli.chat_session import Session
from kvasir.entrypoints.cli.chat_terminal import ask, talk
from kvasir.entrypoints.cli.complete import add_sampling_flags, sampling, server_key
from kvasir.errors import ConfigError
from kvasir.log import get_logger
from kvasir.models import starter

LOCAL_URL = "http://localhost:8000/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--url", nargs="?", const=LOCAL_URL, help=f"talk to a server instead of loading a model (alone: {LOCAL_URL})"
    )
    group.add_argument("--model-name", help="the model, where the server has several (default: its first)")
    group.add_argument("--api-key", help="the server's key (default: $KVASIR_API_KEY, $OPENAI_API_KEY)")
    group.add_argument(
        "--system", "--system-prompt", default="", metavar="TEXT", help="what the model is told before the chat"
    )
    group.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, leave")
    add_sampling_flags(group, max_tokens=1024)
    group.add_argument("--plain", action="store_true", help="no markdown: text as it comes")
    EngineArgs.add_cli_args(parser)


def run(namespace: argparse.Namespace) -> int:

    return start(namespace, sampling(namespace), server_key(namespace))


# ----------------------------------------------------------------
# From the command line's arguments to a conversation.


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
    from kvasir.entrypoints.cli.chat_backend import RemoteModel

    return RemoteModel(namespace.url, key, namespace.model_name or getattr(namespace, "model", None))


def _local(namespace: argparse.Namespace) -> Backend:
    if namespace.api_key or namespace.model_name:
        raise ConfigError("--api-key and --model-name are for a server: add --url.")
    name = starter.NAME if starter.use_if_none_is_named(namespace) else None
    if env.LOG_LEVEL.name not in os.environ:
        get_logger("kvasir").setLevel("WARNING")  # the conversation is what people came for
        namespace.use_tqdm_on_load = getattr(namespace, "use_tqdm_on_load", False)
    args = EngineArgs.from_cli_args(namespace)
    from kvasir.entrypoints.cli.chat_local import LocalModel  # brings the engine

    return LocalModel(args, name)
