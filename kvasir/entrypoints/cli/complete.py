"""`kvasir complete`: completes a text with a server or a local model, and prints the completion as it comes.

The text is given with -q, on standard input, or line by line at a prompt.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvasir.config.args import EngineArgs, flag
from kvasir.config.engine import all_settings
from kvasir.config.env import API_KEY
from kvasir.entrypoints.cli.main import log_warnings_only
from kvasir.errors import ConfigError, KvasirError
from kvasir.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvasir.entrypoints.cli.chat_backend import AnswerUsage, Backend, Piece

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    group = parser.add_argument_group("completion")
    group.add_argument("-q", "--quick", metavar="TEXT", help="complete this text and exit")
    group.add_argument("--stats", action="store_true", help="print token counts and times on standard error")
    add_sampling_flags(group, max_tokens=128)
    EngineArgs.add_cli_args(parser)


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that select a server, which is used unless MODEL is given."""
    group = parser.add_argument_group("server (used unless MODEL is given)")
    group.add_argument("--url", help="base URL of OpenAI's API (default: http://localhost:8000/v1)")
    group.add_argument("--model-name", metavar="NAME", help="one of the server's models (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: ${API_KEY.name}, $OPENAI_API_KEY)")


def add_sampling_flags(group: Any, max_tokens: int) -> None:
    """Add the flags that `sampling` reads."""
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, metavar="T", help="(default: the model's)")
    group.add_argument("--top-p", type=float, metavar="P", help="(default: the model's)")
    group.add_argument("--top-k", type=int, metavar="K", help="(default: the model's)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop sequence; may be repeated")


def run(namespace: argparse.Namespace) -> int:
    prompt = namespace.quick
    if prompt is None and not sys.stdin.isatty():
        prompt = _standard_input()
    restore = log_warnings_only()  # log lines would be mixed with the completion
    try:
        return _answer(namespace, prompt)
    finally:
        restore()


def _answer(namespace: argparse.Namespace, prompt: str | None) -> int:
    params = sampling(namespace)
    backend = _open(namespace)
    try:
        if prompt is not None:
            _print_answer(backend.complete(prompt, params), namespace.stats)
        else:
            _converse(backend, params, namespace.stats)
    finally:
        backend.close()
    return 0


def sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that are given as flags; wrong ones are reported before anything is loaded."""
    given = {name: value for name in _SAMPLING if (value := getattr(namespace, name)) is not None}
    SamplingParams(**given)
    return given


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(f"Standard input is not UTF-8 text: {wrong}.") from None


def _converse(backend: Backend, options: dict[str, Any], stats: bool) -> None:
    print("Type a text to complete. Ctrl-C stops a completion, Ctrl-D exits.", file=sys.stderr)
    while (prompt := _ask()) is not None:
        try:
            _print_answer(backend.complete(prompt, options), stats)
        except KvasirError as error:
            print(f"kvasir: error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print()


def _ask() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _open(namespace: argparse.Namespace) -> Backend:
    """The server or the model that the flags name."""
    given = [name for name in all_settings() if hasattr(namespace, name)]
    if hasattr(namespace, "model"):
        for name in ("url", "model_name", "api_key"):
            if getattr(namespace, name) is not None:
                raise ConfigError(
                    f"{flag(name)} is for a server, and MODEL is loaded here: give one or the other. If "
                    f"{namespace.model!r:.80} is a text to complete, give it with -q."
                )
        from kvasir.entrypoints.cli.chat_local import LocalModel  # brings the engine

        return LocalModel(EngineArgs.from_cli_args(namespace))
    if given:
        raise ConfigError(f"{flag(given[0])} is a setting of a model loaded here: give MODEL, or leave it out.")
    from kvasir.entrypoints.cli.chat_backend import DEFAULT_URL, RemoteModel

    return RemoteModel(namespace.url or DEFAULT_URL, server_key(namespace), namespace.model_name)


def server_key(namespace: argparse.Namespace) -> str | None:
    return namespace.api_key or API_KEY.read_text().partition(",")[0] or os.environ.get("OPENAI_API_KEY")


def _print_answer(pieces: Iterator[Piece], stats: bool) -> None:
    """Print pieces of text as they come."""
    started = time.perf_counter()
    first: float | None = None
    usage: AnswerUsage | None = None
    for piece in pieces:
        if not isinstance(piece, str):
            usage = piece
        elif piece:
            first = first or time.perf_counter()
            print(piece, end="", flush=True)
    print(flush=True)
    if stats:
        print(_stats(started, first, time.perf_counter(), usage), file=sys.stderr)


def _stats(started: float, first: float | None, ended: float, usage: AnswerUsage | None) -> str:
    if usage is None:
        return f"[{ended - started:.2f} s; the server does not report token counts]"
    words = [f"{usage.prompt} tokens in", f"{usage.output} out", f"{ended - started:.2f} s"]
    if first is not None:
        words.append(f"first after {first - started:.2f} s")
        if usage.output > 1 and ended > first:
            words.append(f"then {(usage.output - 1) / (ended - first):.1f} tokens/s")
    return f"[{', '.join(words)}]"
