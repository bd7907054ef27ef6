"""All environment variables that Kvasir reads. They set logging and API keys; settings control the engine.

Any process. A wrong value raises a ConfigError. vLLM's names are accepted where they mean the same.
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
    values: tuple[str, ...] = ()  # empty allows any text
    aliases: tuple[str, ...] = ()

    def read_text(self) -> str:
        """The text of the variable; empty if it is not set."""
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
    "Minimum level of log messages. DEBUG also shows tracebacks of command-line errors.",
    ("INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL"),
    ("VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL"),
)
LOG_FORMAT = Variable(
    "KVASIR_LOG_FORMAT", "Format of log lines; `--log-format` sets it for all processes.", ("TEXT", "JSON")
)
API_KEY = Variable("KVASIR_API_KEY", "API keys that a server accepts, separated by commas.", aliases=("VLLM_API_KEY",))
VARIABLES = (LOG_LEVEL, LOG_FORMAT, API_KEY)

# Environment variables of older vLLM versions -> settings.
SETTING_ALIASES = {"VLLM_ATTENTION_BACKEND": "attention_backend"}


def validate() -> None:
    """Raise a ConfigError if any variable has a wrong value."""
    for variable in VARIABLES:
        if variable.values:
            variable.read()
