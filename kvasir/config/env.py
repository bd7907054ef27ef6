"""The environment variables Kvasir reads, all of them. What the engine does is set by settings, not here.

Any process. A bad value is a ConfigError; vLLM's names are taken where they mean the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvasir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, its possible values (the first is the default) and vLLM's names for it."""

    name: str
    help: str
    values: tuple[str, ...] = ()  # empty: any text
    aliases: tuple[str, ...] = ()

    def read_text(self) -> str:
        """What it holds, as it is; empty if it is not set."""
        return next((text for name in (self.name, *self.aliases) if (text := os.environ.get(name))), "")

    def read(self) -> tuple[str, str]:
        """The value, and the name under which it was found."""
        for name in (self.name, *self.aliases):
            if text := os.environ.get(name):
                if text.upper() not in self.values:
                    raise ConfigError(f"{name}={text} is not possible. Possible: {', '.join(self.values)}.")
                return text.upper(), name
        return self.values[0], self.name


LOG_LEVEL = Variable(
    "KVASIR_LOG_LEVEL",
    "The least important messages to log. DEBUG also shows tracebacks of errors at the command line.",
    ("INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL"),
    ("VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL"),
)
LOG_FORMAT = Variable(
    "KVASIR_LOG_FORMAT", "How log lines are written; `--log-format` sets it for all processes.", ("TEXT", "JSON")
)
API_KEY = Variable("KVASIR_API_KEY", "API keys that a server asks for, separated by commas.", aliases=("VLLM_API_KEY",))
VARIABLES = (LOG_LEVEL, LOG_FORMAT, API_KEY)

# vLLM once took these settings from the environment.
SETTING_ALIASES = {"VLLM_ATTENTION_BACKEND": "attention_backend"}


def validate() -> None:
    """Raise a ConfigError if any variable holds a value it cannot have."""
    for variable in VARIABLES:
        if variable.values:
            variable.read()
