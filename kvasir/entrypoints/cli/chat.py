"""`kvasir chat`: reads the flags and runs a chat in the terminal, with a local model or a server."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvasir.config import env
from kvasir.config.args import EngineArgs
from kvasir.entrypoints.cli.complete import add_sampling_flags, sampling, server_key
from kvasir.entrypoints.cli.main import log_warnings_only
from kvasir.errors import ConfigError
from kvasir.models import hub

if TYPE_CHECKING:
    from kvasir.entrypoints.cli.chat_backend import Backend

LOCAL_URL = "http://localhost:8000/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--url",
        nargs="?",
        const=LOCAL_URL,
        help=f"use a server instead of a local model (without a value: {LOCAL_URL})",
    )
    group.add_argument("--model-name", help="model of the server (default: its first)")
    group.add_argument("--api-key", help="API key of the server (default: $KVASIR_API_KEY, $OPENAI_API_KEY)")
    group.add_argument("--system", "--system-prompt", default="", metavar="TEXT", help="system prompt")
    group.add_argument("-q", "--quick", metavar="TEXT", help="send this message, print the reply and exit")
    add_sampling_flags(group, max_tokens=1024)
    group.add_argument("--plain", action="store_true", help="print plain text instead of rendered markdown")
    EngineArgs.add_cli_args(parser)


def run(namespace: argparse.Namespace) -> int:
    restore = log_warnings_only()  # log lines would be mixed with the chat
    try:
        return start(namespace, sampling(namespace), server_key(namespace))
    finally:
        restore()


def start(namespace: argparse.Namespace, params: dict[str, Any], key: str | None) -> int:
    """Run the chat and return the exit status. `key` is the API key of the server."""
    # Imported here, so that `kvasir chat --help` is fast.
    from rich.console import Console

    from kvasir.entrypoints.cli.chat_session import Session
    from kvasir.entrypoints.cli.chat_terminal import ask, run_chat

    console = Console()
    with console.status("loading") if console.is_terminal else nullcontext():
        backend = _remote(namespace, key) if namespace.url else _local(namespace)
    try:
        session = Session(backend, system=namespace.system, params=params)
        if namespace.quick is not None:
            return ask(session, console, namespace.quick, not namespace.plain)
        return run_chat(session, console, not namespace.plain)
    finally:
        backend.close()


def _remote(namespace: argparse.Namespace, key: str | None) -> Backend:
    from kvasir.entrypoints.cli.chat_backend import RemoteModel

    return RemoteModel(namespace.url, key, namespace.model_name or getattr(namespace, "model", None))


def _local(namespace: argparse.Namespace) -> Backend:
    if namespace.api_key or namespace.model_name:
        raise ConfigError("--api-key and --model-name need a server; add --url.")
    name = hub.STARTER if hub.use_starter_by_default(namespace) else None
    if env.LOG_LEVEL.name not in os.environ:
        namespace.use_tqdm_on_load = getattr(namespace, "use_tqdm_on_load", False)
    args = EngineArgs.from_cli_args(namespace)
    from kvasir.entrypoints.cli.chat_local import LocalModel  # imports the engine

    return LocalModel(args, name)
