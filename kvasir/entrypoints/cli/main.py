"""The command `kvasir`. The module of a subcommand is imported only when it is used, so that --help is instant.

Such a module defines `add_arguments(parser)` and `run(namespace)`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvasir import __version__
from kvasir.config import env
from kvasir.config.engine import did_you_mean
from kvasir.config.vllm_settings import vllm_only
from kvasir.entrypoints.cli.help import HELP, help_on, short_usage
from kvasir.errors import ConfigError, KvasirError
from kvasir.log import get_logger

COMMANDS = {
    "serve": ("kvasir.entrypoints.cli.serve", "serve a model over HTTP with the APIs of OpenAI and Anthropic"),
    "chat": ("kvasir.entrypoints.cli.chat", "chat with a model in the terminal"),
    "complete": ("kvasir.entrypoints.cli.complete", "complete a text, with a server or a local model"),
    "run-batch": ("kvasir.entrypoints.cli.run_batch", "process a file of requests in OpenAI's batch format"),
    "bench": ("kvasir.entrypoints.cli.bench", "measure throughput, latency, a server under load, or startup"),
    "collect-env": (
        "kvasir.entrypoints.cli.collect_env",
        "describe this machine and installation for a bug report",
    ),
}


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts --max_model_len for --max-model-len and --help=WORD as vLLM does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", action="help", help=HELP)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvasir: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [_with_dashes(arg) for arg in (sys.argv[1:] if args is None else args)]
        if (word := self._help_word(given)) is not None:
            status, text = help_on(self, word)
            (sys.stderr if status else sys.stdout).write(text)
            self.exit(status)
        return super().parse_known_args(given, namespace)

    def _help_word(self, given: Sequence[str]) -> str | None:
        """The word after --help=; None if a subcommand comes before it, which then handles it."""
        for arg in given:
            if arg.startswith("--help="):
                return arg.partition("=")[2]
            if arg == "--" or (self._subparsers is not None and not arg.startswith("-")):
                return None
        return None

    def format_help(self) -> str:
        self.usage = self.usage or short_usage(self)
        return super().format_help()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status, which is 2 for errors that the user must correct."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        env.validate()
        parser = _parser(arguments)
        namespace, unknown = parser.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                raise ConfigError(f"The argument {name!r} is one too many; only flags may follow.")
            raise ConfigError(
                vllm_only(name, "flag") or f"{name} is not a flag of this command.{did_you_mean(name, _flags(parser))}"
            )
        return int(import_module(COMMANDS[namespace.command][0]).run(namespace))
    except KvasirError as error:
        if get_logger("kvasir").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"kvasir: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports an error at exit
        return 141


def _parser(arguments: Sequence[str]) -> Parser:
    parser = Parser(prog="kvasir", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"kvasir {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            import_module(module).add_arguments(command)
    return parser


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag of the parser and of its subcommands."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= {flag for command in action.choices.values() for flag in _flags(command)}
    return flags


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def log_warnings_only(name: str = "kvasir") -> Callable[[], None]:
    """Raise the log level to WARNING unless the environment sets one. Returns a function that restores it."""
    logger = logging.getLogger(name)
    before = logger.level
    if not any(os.environ.get(variable) for variable in (env.LOG_LEVEL.name, *env.LOG_LEVEL.aliases)):
        logger.setLevel("WARNING")
    return lambda: logger.setLevel(before)
