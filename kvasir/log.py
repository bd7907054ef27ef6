"""Logging: one line per event on standard error, as text or JSON. Any process.

KVASIR_LOG_LEVEL sets the level and KVASIR_LOG_FORMAT the format. Callers add entries to a JSON line with
`extra={"fields": {...}}`. Importing this never fails: `env.validate()` reports a wrong level.

Processes of a server call `write_in_background`: lines are then written by a thread, so that a reader of the log that
stands still stops nothing else. Lines beyond a number are dropped and counted. Long lines and fields are cut. Whatever
other packages log, warn of or print to standard error goes the same way and has the same format.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

from kvasir.config import env
from kvasir.errors import ConfigError

MAX_LINE = 16384  # characters of a message, and of a traceback
MAX_FIELD = 1024  # characters of a JSON line's other entries
_MAX_WAITING = 4096  # lines that wait to be written
_PIECE = 4096  # bytes that fit into a pipe that is ready
_EXIT_SECONDS = 1.0  # for waiting lines to be written when the process ends
_warned: set[str] = set()


class _Stderr(logging.Handler):
    """Writes to the current sys.stderr, so that redirecting it works."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
            if _writer is None:
                sys.stderr.write(line)
            else:
                _writer.put(line, self)
        except Exception:
            self.handleError(record)


class _BackgroundWriter:
    """Writes lines in a thread. `put` never waits; it may be called in signal handlers, which a SimpleQueue allows."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._num_dropped = 0
        threading.Thread(target=self._run, daemon=True, name="log").start()

    def put(self, line: str, handler: logging.Handler) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            self._num_dropped += 1
        elif self._num_dropped:
            count, self._num_dropped = self._num_dropped, 0
            text = f"{count} log lines were dropped here: the log was not read for a while"
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
            self._waiting.put(handler.format(record) + "\n" + line)
        else:
            self._waiting.put(line)

    def flush(self, seconds: float) -> None:
        """Wait until what was put is written, but not longer than this."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(seconds)

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with suppress(OSError, ValueError):  # there is nobody to tell
                _write(self._stream, item)


def _write(stream: TextIO, text: str) -> None:
    try:
        descriptor = stream.fileno()
        ready = select.poll()
    except (AttributeError, OSError, ValueError):  # it is no file, or this is Windows
        stream.write(text)
        return
    ready.register(descriptor, select.POLLOUT)
    data = text.encode("utf-8", "backslashreplace")
    while data:
        # Waiting here and not in `write` holds no lock of the stream, which the process needs in order to end.
        ready.poll()
        with suppress(BlockingIOError):
            data = data[os.write(descriptor, data[:_PIECE]) :]


class _Printed:
    """Stands in for sys.stderr: what is printed becomes log lines, as it is or as JSON."""

    def __init__(self, stream: TextIO, writer: _BackgroundWriter, handler: logging.Handler) -> None:
        self._stream = stream
        self._writer = writer
        self._handler = handler
        self._rest = ""  # a line without its end
        self._lock = threading.RLock()  # a signal handler may print, too

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).splitlines(keepends=True) or [""]
            if self._rest.endswith(("\n", "\r")) or len(self._rest) > MAX_LINE:
                lines, self._rest = [*lines, self._rest], ""
            for line in lines:
                self._put(line)
        return len(text)

    def flush(self) -> None:
        """Show the beginning of a line, such as a progress bar; a line of JSON is written when it is whole."""
        with self._lock:
            if self._rest and not isinstance(self._handler.formatter, _Json):
                self._put(self._rest)
                self._rest = ""

    def _put(self, line: str) -> None:
        if not isinstance(self._handler.formatter, _Json):
            self._writer.put(line, self._handler)
        elif line.strip():
            record = logging.LogRecord("stderr", logging.WARNING, "", 0, "%s", (line.rstrip(),), None)
            self._writer.put(self._handler.format(record) + "\n", self._handler)


_writer: _BackgroundWriter | None = None


def write_in_background() -> None:
    """From now on, let a thread of this process write log lines, those of other packages too."""
    global _writer
    if _writer is None:
        _writer = _BackgroundWriter()
        atexit.register(flush)
        _take_over(_writer)


def _take_over(writer: _BackgroundWriter) -> None:
    ours, root, console = handler(), logging.getLogger(), (sys.stderr, sys.__stderr__)
    sys.stderr = _Printed(sys.stderr, writer, ours)
    known = (each for each in logging.Logger.manager.loggerDict.values() if isinstance(each, logging.Logger))
    for logger in (root, *known):
        for old in list(logger.handlers):
            if isinstance(old, logging.StreamHandler) and old.stream in console:
                logger.removeHandler(old)
                logger.propagate = True
    root.addHandler(ours)
    logging.captureWarnings(True)


def flush(seconds: float = _EXIT_SECONDS) -> None:
    """Wait until all lines are written, up to a time."""
    if _writer is not None:
        _writer.flush(seconds)


def print_last(text: str) -> None:
    """Print a line to standard error after all log lines."""
    if _writer is None:
        print(text, file=sys.stderr)
    else:
        _writer.put(text + "\n", logging.NullHandler())
        _writer.flush(_EXIT_SECONDS)


def _cut(text: str, most: int) -> str:
    """A text without its middle if it is long: a traceback's end says what happened."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {len(text) - most} characters ... {text[-(most // 2) :]}"


def _cut_field(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
        return value if len(text) <= MAX_FIELD else _cut(text, MAX_FIELD)
    return _cut(str(value), MAX_FIELD)


_CONTROL = {number: ascii(chr(number))[1:-1] for number in (*range(9), *range(10, 32), 127, 0x85, 0x2028, 0x2029)}


class _Text(logging.Formatter):
    """Formats a record as one line, and a traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _cut(record.message, MAX_LINE)
        if (
            record.name.partition(".")[0] == "kvasir"
        ):  # it may repeat a client's text, which could look like other lines
            record.message = record.message.translate(_CONTROL)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _cut(super().formatException(ei), MAX_LINE)


class _Json(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _cut(record.getMessage(), MAX_LINE),
            **{name: _cut_field(value) for name, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            line["traceback"] = _cut(self.formatException(record.exc_info), MAX_LINE)
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
        made.setFormatter(_Text("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
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
