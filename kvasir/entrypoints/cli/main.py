"""The command `kvasir`. The module of a subcommand is imported only when it is used, so that --help is instant.

Such a module, or the class in it that the table names, has `add_arguments(parser)` and `run(namespace)`, which returns
the exit status.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvasir import __version__
from kvasir.config import env
from kvasir.config.args import with_flags
from kvasir.config.vllm_names import vllm_only, without_empty_flags
from kvasir.errors import ConfigError, KvasirError, did_you_mean
from kvasir.log import get_logger

COMMANDS = {
    "serve": ("kvasir.entrypoints.cli.serve", "serve a model over HTTP with the APIs of OpenAI and Anthropic"),
    "chat": ("kvasir.entrypoints.cli.chat", "chat with a model in the terminal"),
    "complete": ("kvasir.entrypoints.cli.complete", "complete a text, with a server or a local model"),
    "run-batch": ("kvasir.entrypoints.cli.run_batch", "process a file of requests in OpenAI's batch format"),
    "warm": ("kvasir.entrypoints.cli.prepare:Warm", "compile what serving a model on this device needs, and end"),
    "quantize": ("kvasir.entrypoints.cli.prepare:Quantize", "write a quantized copy of a checkpoint"),
    "bench": ("kvasir.entrypoints.cli.bench", "measure throughput, latency, embeddings, a server, or startup"),
    "merge-lora": ("kvasir.entrypoints.cli.prepare:MergeLora", "merge a LoRA adapter into a checkpoint"),
    "collect-env": (
        "kvasir.entrypoints.cli.collect_env",
        "describe this machine and installation for a bug report",
    ),
}
HELP = "show help; =listgroup lists the groups of flags, =GROUP shows one group, =WORD shows flags with that word"
MAX_USAGE_FLAGS = 12  # a usage line with more is hard to read
_VLLM_GROUPS = {"frontend": "server"}  # vLLM's name -> ours, where they differ by more than "Config"
Sections = list[tuple[str, list[argparse.Action]]]


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts --max_model_len for --max-model-len and --help=WORD as vLLM does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False)
        self.add_argument("-h", "--help", action="help", help=HELP)

    def error(self, message: str) -> NoReturn:
        message = with_flags(message, _flags(self))
        argument = re.match(r"argument ([\w/-]+): ", message)
        if argument and message.startswith(tuple(argument[1].split("/")), argument.end()):
            message = message[argument.end() :]  # it names the flag itself
        self.exit(2, f"kvasir: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [_with_dashes(arg) for arg in (sys.argv[1:] if args is None else args)]
        if (word := self._help_word(given)) is not None:
            status, text = help_on(self, word)
            (sys.stderr if status else sys.stdout).write(text)
            self.exit(status)
        return super().parse_known_args(list(without_empty_flags(given)), namespace)

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
    parser = Parser(prog="kvasir")
    try:
        env.validate()
        parser = _parser(arguments)
        namespace, unknown = parser.parse_known_args(arguments)
        if unknown:
            name = next((each for each in unknown if each.startswith("-")), unknown[0]).partition("=")[0]
            if not name.startswith("-"):
                raise ConfigError(f"The argument {name!r} is one too many; only flags may follow.")
            near = did_you_mean(name, _flags(_chosen(parser, namespace)), by_words=True)
            raise ConfigError(vllm_only(name, "flag") or f"{name} is not a flag of this command.{near}")
        return int(_load(COMMANDS[namespace.command][0]).run(namespace))
    except KvasirError as error:
        if get_logger("kvasir").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"kvasir: error: {with_flags(str(error), _flags(parser))}", file=sys.stderr)
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
    for name, (place, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            _load(place).add_arguments(command)
    return parser


def _load(place: str) -> Any:
    """The module of a subcommand, or the class in it: `module` or `module:Class`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def _chosen(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the subcommand that was named."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _chosen(action.choices[getattr(namespace, action.dest)], namespace)
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


# ---------------------------------------------------------------- help on a part of a command
# As in vLLM: --help=listgroup, --help=GROUP, --help=WORD, --help=all.


def help_on(parser: argparse.ArgumentParser, asked: str) -> tuple[int, str]:
    """The exit status, and the text to print."""
    word = asked.lower().strip("- ").replace("_", "-")
    short = word.removesuffix("config").strip("-")  # vLLM's group SchedulerConfig is called scheduler here
    if word == "all":
        return 0, parser.format_help()
    if word == "listgroup":
        return 0, _list_groups(parser)
    sections = _sections(parser)
    for name in (word, _VLLM_GROUPS.get(short, short)):
        if found := [section for section in sections if _group_name(section[0]) == name]:
            return 0, _format_sections(parser, found)
    for part in filter(None, (word, short)):
        if found := _with_word(sections, part):
            return 0, _format_sections(parser, found)
    return 2, f"kvasir: error: {_unknown_help(parser, asked, word, sections)}\n"


def short_usage(parser: argparse.ArgumentParser) -> str | None:
    """A usage line without optional flags; None if there are few flags."""
    actions = [action for _, actions in _sections(parser) for action in actions]
    flags = [action for action in actions if action.option_strings]
    if len(flags) <= MAX_USAGE_FLAGS:
        return None
    required = [f"{action.option_strings[0]} {action.metavar}" for action in flags if action.required]
    others = [f"[{action.metavar or action.dest}]" for action in actions if not action.option_strings]
    return " ".join(["%(prog)s", *required, *others, "[FLAGS]"])


def _sections(parser: argparse.ArgumentParser) -> Sections:
    """The title of every group, and its arguments that are not hidden."""
    groups = [(group.title or "", group._group_actions) for group in parser._action_groups]
    shown = [(title, [each for each in actions if each.help != argparse.SUPPRESS]) for title, actions in groups]
    return [(title, actions) for title, actions in shown if actions]


def _group_name(title: str) -> str:
    """The name of a group for --help: its title without article and remarks."""
    return re.sub(r"^(the|a) |\s*\(.*", "", title.lower())


def _with_word(sections: Sections, word: str) -> Sections:
    found = [
        (title, [action for action in actions if any(word in flag for flag in action.option_strings)])
        for title, actions in sections
    ]
    return [(title, actions) for title, actions in found if actions]


def _format_sections(parser: argparse.ArgumentParser, sections: Sections) -> str:
    formatter = parser._get_formatter()
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _list_groups(parser: argparse.ArgumentParser) -> str:
    lines = [f"Groups of {parser.prog}'s flags; --help=NAME shows one group, --help=all shows all:"]
    for title, actions in _sections(parser):
        if flags := list(_long_flags([(title, actions)])):
            some = ", ".join(flags[:3]) + (", ..." if len(flags) > 3 else "")
            lines.append(f"  {_group_name(title):<12} {some}")
    return "\n".join(lines) + "\n"


def _long_flags(sections: Sections) -> Iterator[str]:
    """The long name of each flag."""
    for _, actions in sections:
        for action in actions:
            yield from [flag for flag in action.option_strings if flag.startswith("--")][:1]


def _unknown_help(parser: argparse.ArgumentParser, asked: str, word: str, sections: Sections) -> str:
    if missing := vllm_only(f"--{word}", "flag"):
        return missing
    near = did_you_mean(
        word, [*(_group_name(title) for title, _ in sections), *(flag[2:] for flag in _long_flags(sections))]
    )
    message = f"{parser.prog} has no group {asked!r} and no flag with that word.{near}"
    return f"{message} --help=listgroup lists the groups."
