"""Logging: one line per event on standard error. Any process.

The level comes from KVASIR_LOG_LEVEL. Importing this never fails: a bad level is reported by `env.validate()`.
"""

from __future__ import annotations

import logging
import sys

from kvasir import env
from kvasir.errors import ConfigError

_warned: set[str] = set()


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is at the moment, so that redirecting it works."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning unless this very one was logged before in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def _configure() -> None:
    root = logging.getLogger("kvasir")
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.propagate = False
    try:
        level, name = env.LOG_LEVEL.read()
    except ConfigError:
        level, name = "INFO", env.LOG_LEVEL.name
    root.setLevel(level)
    if name != env.LOG_LEVEL.name:
        warn_once(root, f"{name} is vLLM's name; Kvasir's is {env.LOG_LEVEL.name}.")


_configure()
