"""Logging: one line per event on standard error, as text or JSON. Any process.

KVASIR_LOG_LEVEL sets the level and KVASIR_LOG_FORMAT the format. Callers add entries to a JSON line with
`extra={"fields": {...}}`. Importing this never fails: `env.validate()` reports a wrong level.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from kvasir.config import env
from kvasir.errors import ConfigError

_warned: set[str] = set()


class _Stderr(logging.Handler):
    """Writes to the current sys.stderr, so that redirecting it works."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


class _Json(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning unless the same one was logged before in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def handler() -> logging.Handler:
    """A handler that writes log lines in the format of KVASIR_LOG_FORMAT."""
    made = _Stderr()
    if env.LOG_FORMAT.read_text().upper() == "JSON":
        made.setFormatter(_Json())
    else:
        made.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    return made


def configure() -> None:
    """Set up logging from the environment. A second call reads it again."""
    root = logging.getLogger("kvasir")
    for old in [each for each in root.handlers if isinstance(each, _Stderr)]:
        root.removeHandler(old)
    root.addHandler(handler())
    root.propagate = False
    try:
        level, name = env.LOG_LEVEL.read()
    except ConfigError:
        level, name = "INFO", env.LOG_LEVEL.name
    root.setLevel(level)
    if name != env.LOG_LEVEL.name:
        warn_once(root, f"{name} is vLLM's name; use {env.LOG_LEVEL.name}.")


configure()
