"""`kvasir chat`: flags in, a conversation in the terminal."""

from __future__ import annotations

import argparse

from kvasir.args import EngineArgs
from kvasir.cli.complete import add_sampling_flags, sampling, server_key

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
    from kvasir.chat.start import start

    return start(namespace, sampling(namespace), server_key(namespace))
