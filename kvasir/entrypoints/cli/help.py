"""Help on a part of a command, as in vLLM: --help=listgroup, --help=GROUP, --help=WORD, --help=all."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from kvasir.config.engine import did_you_mean
from kvasir.config.vllm_settings import vllm_only

HELP = "show help; =listgroup lists the groups of flags, =GROUP shows one group, =WORD shows flags with that word"
MAX_USAGE_FLAGS = 12  # a usage line with more is hard to read
_VLLM_GROUPS = {"frontend": "server"}  # vLLM's name -> ours, where they differ by more than "Config"
Sections = list[tuple[str, list[argparse.Action]]]


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
        if found := [section for section in sections if _name(section[0]) == name]:
            return 0, _format(parser, found)
    for part in filter(None, (word, short)):
        if found := _with_word(sections, part):
            return 0, _format(parser, found)
    return 2, f"kvasir: error: {_unknown(parser, asked, word, sections)}\n"


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


def _name(title: str) -> str:
    """The name of a group for --help: its title without article and remarks."""
    return re.sub(r"^(the|a) |\s*\(.*", "", title.lower())


def _with_word(sections: Sections, word: str) -> Sections:
    found = [
        (title, [action for action in actions if any(word in flag for flag in action.option_strings)])
        for title, actions in sections
    ]
    return [(title, actions) for title, actions in found if actions]


def _format(parser: argparse.ArgumentParser, sections: Sections) -> str:
    formatter = parser._get_formatter()
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _list_groups(parser: argparse.ArgumentParser) -> str:
    lines = [f"Groups of {parser.prog}'s flags; --help=NAME shows one group, --help=all shows all:"]
    for title, actions in _sections(parser):
        if flags := list(_flags([(title, actions)])):
            some = ", ".join(flags[:3]) + (", ..." if len(flags) > 3 else "")
            lines.append(f"  {_name(title):<12} {some}")
    return "\n".join(lines) + "\n"


def _flags(sections: Sections) -> Iterator[str]:
    """The long name of each flag."""
    for _, actions in sections:
        for action in actions:
            yield from [flag for flag in action.option_strings if flag.startswith("--")][:1]


def _unknown(parser: argparse.ArgumentParser, asked: str, word: str, sections: Sections) -> str:
    if missing := vllm_only(f"--{word}", "flag"):
        return missing
    near = did_you_mean(word, [*(_name(title) for title, _ in sections), *(flag[2:] for flag in _flags(sections))])
    message = f"{parser.prog} has no group {asked!r} and no flag with that word.{near}"
    return f"{message} --help=listgroup lists the groups."
