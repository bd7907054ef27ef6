"""Logging: one line per event on standard error, as text or JSON. Any process.

The level comes from KVASIR_LOG_LEVEL, the form from KVASIR_LOG_FORMAT. What a caller adds as `extra={"fields": {...}}`
is a JSON line's further entries. Importing this never fails: a bad level is reported by `env.validate()`.
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
    """Writes to whatever sys.stderr is at the moment, so that redirecting it works."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


class _Json(logging.Formatter):
    """A line that programs read."""

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
    """Log a warning unless this very one was logged before in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def handler() -> logging.Handler:
    """What writes log lines in the form that KVASIR_LOG_FORMAT asks for."""
    made = _Stderr()
    if env.LOG_FORMAT.read_text().upper() == "JSON":
        made.setFormatter(_Json())
    else:
        made.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    return made


def configure() -> None:
    """Set logging up from the environment; a second call reads it anew."""
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
        warn_once(root, f"{name} is vLLM's name; Kvasir's is {env.LOG_LEVEL.name}.")


configure()
