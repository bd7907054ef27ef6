"""`kvasir chat`: flags in, a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from kvasir import env, starter
from kvasir.args import EngineArgs
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    from kvasir.chat.backend import Backend

LOCAL_URL = "http://localhost:8000/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--url", nargs="?", const=LOCAL_URL, help=f"talk to a server instead of loading a model (alone: {LOCAL_URL})"
    )
    group.add_argument("--model-name", help="the model, where the server has several (default: its first)")
    group.add_argument("--api-key", help="the server's key (default: KVASIR_API_KEY)")
    group.add_argument(
        "--system", "--system-prompt", default="", metavar="TEXT", help="what the model is told before the chat"
    )
    group.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, leave")
    group.add_argument("--plain", action="store_true", help="no markdown: text as it comes")
    EngineArgs.add_cli_args(parser)


def run(namespace: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console()
    with console.status("getting ready", spinner="dots") if console.is_terminal else _Nothing():
        backend = _remote(namespace) if namespace.url else _local(namespace)
    try:
        return _talk(namespace, console, backend)
    finally:
        backend.close()


def _talk(namespace: argparse.Namespace, console: object, backend: Backend) -> int:
    from rich.console import Console

    from kvasir.chat.session import Session
    from kvasir.chat.terminal import ask, talk

    assert isinstance(console, Console)
    session = Session(backend, system=namespace.system)
    if namespace.quick is not None:
        return 0 if ask(session, console, namespace.quick, not namespace.plain) else 1
    return talk(session, console, not namespace.plain)


def _remote(namespace: argparse.Namespace) -> Backend:
    from kvasir.chat.remote import RemoteModel

    key = namespace.api_key or env.API_KEY.read()[0].partition(",")[0]
    return RemoteModel(namespace.url, key, namespace.model_name or getattr(namespace, "model", None))


def _local(namespace: argparse.Namespace) -> Backend:
    if namespace.api_key or namespace.model_name:
        raise ConfigError("--api-key and --model-name are for a server: add --url.")
    name = starter.NAME if starter.use_if_none_is_named(namespace) else None
    if env.LOG_LEVEL.name not in os.environ:
        from kvasir.log import get_logger

        get_logger("kvasir").setLevel("WARNING")  # the conversation is what people came for
        namespace.use_tqdm_on_load = getattr(namespace, "use_tqdm_on_load", False)
    args = EngineArgs.from_cli_args(namespace)
    from kvasir.chat.local import LocalModel

    return LocalModel(args, name)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
