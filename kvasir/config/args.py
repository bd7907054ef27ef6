"""EngineArgs: every setting in one flat object, made from keywords, command-line flags or a YAML file. Any process.

It converts user input, such as "32k" and older names, to values; engine.py checks them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from kvasir.config import env
from kvasir.config.engine import EngineConfig, SettingField, all_settings
from kvasir.config.vllm_names import asks_for_nothing, unknown_setting
from kvasir.errors import ConfigError
from kvasir.log import get_logger, warn_once

logger = get_logger(__name__)

# Older vLLM name -> the setting, the entry of it, and the type that replaced it.
OLD_NAMES = {
    "rope_scaling": ("hf_overrides", "rope_scaling", dict),
    "rope_theta": ("hf_overrides", "rope_theta", float),
    "speculative_model": ("speculative_config", "model", str),
    "num_speculative_tokens": ("speculative_config", "num_speculative_tokens", int),
    "guided_decoding_backend": ("structured_outputs_config", "backend", str),
}
DTYPE_NAMES = {"half": "float16", "float": "float32"}
# vLLM's names of attention backends in lower case, where Kvasir's differ.
BACKEND_NAMES = {"triton_attn": "triton", "torch_sdpa": "torch", "cpu_attn": "cpu"}
# Settings that vLLM leaves at None where it chooses for itself.
NONE_IS_DEFAULT = ("attention_backend", "enable_prefix_caching", "enable_chunked_prefill", "kv_offloading_size")
# As in vLLM, lower-case units are powers of 1000 and upper-case ones powers of 1024.
SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _with_settings(cls: type[EngineArgs]) -> type[EngineArgs]:
    """Make the class a dataclass with a field for every setting."""
    cls.__annotations__ = {}
    for name, known in all_settings().items():
        cls.__annotations__[name] = known.field.type
        setattr(cls, name, field(default_factory=partial(getattr, known, "default"), repr=known.field.repr))
    return dataclass(init=False)(cls)


@_with_settings
class EngineArgs:
    """Every setting, by its vLLM name. A wrong name, type or value raises a ConfigError that says what is possible."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        env.validate()
        if model is not None:
            settings["model"] = model
        given = _from_environment(_from_old_names(settings))
        for name, known in all_settings().items():
            value = given.pop(name) if name in given else known.default
            setattr(self, name, from_python(name, known, value))
        for name, value in given.items():
            if not asks_for_nothing(name, value, given):
                raise ConfigError(unknown_setting(name, all_settings()))
        self.create_engine_config()  # checks all values now

    def create_engine_config(self) -> EngineConfig:
        """The settings grouped by section and checked. Settings at `auto` stay open until resolve.py."""
        sections: dict[str, dict[str, Any]] = {}
        for name, known in all_settings().items():
            sections.setdefault(known.section, {})[name] = getattr(self, name)
        classes = get_type_hints(EngineConfig)
        return EngineConfig(**{section: classes[section](**values) for section, values in sections.items()})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add MODEL, --config and a flag for each setting. Flags that are not given are left out of the namespace."""
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model")
        parser.add_argument(
            "--config", action=_ConfigFile, metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings"
        )
        groups: dict[str, Any] = {}
        for name, known in all_settings().items():
            if known.section not in groups:
                groups[known.section] = parser.add_argument_group(known.section)
            groups[known.section].add_argument(*known.setting.short, flag(name), **flag_options(name, known))
        for name, (_, _, kind) in OLD_NAMES.items():
            read = partial(_read_argument, partial(from_text, name, (kind,)))
            parser.add_argument(flag(name), type=read, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """Take the settings from parsed arguments and ignore all others, such as those of a subcommand."""
        names = all_settings().keys() | OLD_NAMES.keys()
        return cls(**{name: value for name, value in vars(namespace).items() if name in names})


AsyncEngineArgs = EngineArgs  # vLLM's name


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def flags_of(settings: Mapping[str, SettingField]) -> list[str]:
    """The flags of settings; a boolean one also has --no-NAME."""
    found = [flag(name) for name in settings]
    return found + [flag(f"no_{name}") for name, known in settings.items() if bool in known.types]


# Settings whose names are no words of English, so that they mean the setting wherever they stand.
_NO_WORDS = ("dtype", "uds")


def with_flags(message: str, flags: Iterable[str]) -> str:
    """An error message with `flags` in place of Python's names: --seed=-1 for seed=-1.

    A name that is also a word of English is replaced only where it must be the name: before an equals sign, in
    backticks, after "set", or as the first word. Quoted text and paths are left alone.
    """
    known = {each.removeprefix("--").replace("-", "_"): each for each in flags if each.startswith("--")}
    names = "|".join(sorted(known, key=len, reverse=True))

    def replaced(match: re.Match[str]) -> str:
        before, name, value = match.string[: match.start()], match["name"], match["value"] or ""
        is_word = "_" not in name and name not in _NO_WORDS
        if is_word and not (value or not before or before.endswith(("`", "set ", "Set "))):
            return match[0]
        if value == "=False" and f"no_{name}" in known:
            return known[f"no_{name}"]
        return known[name] + ("" if value == "=True" else value)

    value = r"(?P<value>=(?:True\b|False\b)?)"
    return re.sub(rf"(?<![\w./'\"-])(?P<name>{names})(?:{value}|(?![\w'\"/-]|\.\w))", replaced, message)


# ---------------------------------------------------------------- values


def from_python(name: str, known: SettingField, value: Any) -> Any:
    """The value of a setting given in Python or YAML."""
    if known.setting.auto and value == "auto":
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None and (dict in known.types or name in NONE_IS_DEFAULT):
        return known.default
    if value is None and name == "seed":
        return secrets.randbelow(2**31)  # no seed: other numbers in every run
    if isinstance(value, str) and int in known.types and bool not in known.types:
        return parse_size(name, value)
    if name == "dtype":
        value = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
        return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value
    if name == "attention_backend" and isinstance(value, str):
        lower = value.lower()  # vLLM writes FLASH_ATTN
        return BACKEND_NAMES.get(lower, lower if lower in known.setting.choices else value)
    return value


def from_text(name: str, types: tuple[type, ...], text: str) -> Any:
    """The value of a setting given as a flag."""
    if dict in types or list in types:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            like = '{"key": 1}' if dict in types else '["a", "b"]'
            raise ConfigError(f"{name} takes JSON, such as '{like}'; {text!r} is not JSON ({error}).") from None
    if float in types:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r} is not a number.") from None
    if int in types and text != "auto":
        return parse_size(name, text)
    return text


def parse_size(name: str, text: str) -> int:
    """A whole number with an optional unit: 4096, 1k (1000), 1K (1024), 25.6k."""
    match = re.fullmatch(r"(-?\d+)(\.\d+)?([kmgtKMGT]?)", text.strip())
    if match:
        whole, part, unit = match.groups()
        size = Fraction(whole + (part or "")) * SIZE_UNITS[unit]
        if size.denominator == 1:
            return size.numerator
    raise ConfigError(f"{name}={text!r} is not a whole number. Possible: 4096, 1k (1000), 1K (1024), 25.6k.")


# ---------------------------------------------------------------- older names


def _from_old_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(settings)
    for old, (new, key, _) in OLD_NAMES.items():
        value = given.pop(old, None)
        if value is None or not isinstance(given.get(new), dict | None):
            continue  # nothing to move, or `new` has a wrong type, which its check reports
        warn_once(logger, f"{old} is deprecated; set {new}={{{key!r}: ...}}.")
        entries = given.get(new) or {}
        if key in entries:
            raise ConfigError(f"{old} and {new}[{key!r}] were both given. Remove {old}, the older name.")
        given[new] = {**entries, key: value}
    return given


def _from_environment(given: dict[str, Any]) -> dict[str, Any]:
    for variable, name in env.SETTING_ALIASES.items():
        value = os.environ.get(variable)
        if value and name not in given:
            warn_once(logger, f"{variable} is deprecated; set {name} or {flag(name)}.")
            given[name] = value
    return given


# ---------------------------------------------------------------- flags and the config file


def _read_argument(convert: Callable[[str], Any], text: str) -> Any:
    """Convert a flag's text. Argparse would replace the message of a ConfigError, which is a ValueError."""
    try:
        return convert(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flag_options(name: str, known: SettingField) -> dict[str, Any]:
    """Arguments of `add_argument` for the flag of a setting."""
    shown = known.setting.auto or known.default
    text = f"{known.setting.help} (default: {shown})" if shown not in (None, {}, "") else known.setting.help
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if known.types == (bool,):
        return options | {"action": argparse.BooleanOptionalAction}
    if bool in known.types:  # the flag's value is optional
        options |= {"nargs": "?", "const": True}
    if known.setting.choices:
        options["metavar"] = "{" + ",".join(map(str, known.setting.choices)) + "}"
    else:
        options["metavar"] = "JSON" if dict in known.types or list in known.types else name.upper()
    return options | {"type": partial(_read_argument, partial(from_text, name, known.types))}


class _ConfigFile(argparse.Action):
    """--config FILE: sets every flag that the command line does not set, before or after it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        actions = {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}
        entries = read_config_file(values)
        for key, value in entries.items():
            action = actions.get(key.replace("-", "_"))
            if action is None and asks_for_nothing(key, value, entries):
                continue
            if action is None or action is self:
                raise ConfigError(f"{values}: {unknown_setting(key, map(flag, actions))}")
            if getattr(namespace, action.dest, action.default) == action.default:
                setattr(namespace, action.dest, self._read(action, value))
        setattr(namespace, self.dest, values)

    def _read(self, action: argparse.Action, value: Any) -> Any:
        """Read text and numbers as on the command line; keep mappings and lists as YAML has them."""
        try:
            plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            return action.type(str(value)) if plain and callable(action.type) else value
        except (argparse.ArgumentTypeError, ValueError) as error:
            named = str(error) if str(error).startswith(action.dest) else f"{action.dest}: {error}"
            raise argparse.ArgumentError(self, named) from None


def read_config_file(path: str, what: str = "config file") -> dict[str, Any]:
    """The entries of a YAML file."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"The {what} {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The {what} {path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise ConfigError(f"The {what} {path} must be a list of `setting: value` lines.")
    return entries
