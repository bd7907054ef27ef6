"""The log of a server's process: what any package says is written in the background, in our format."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys

import pytest

from kvasir import log

# Says something in every way that packages have, after a reader that stands still has let the pipe fill.
SPEAKER = """
import asyncio, logging, sys, warnings
early = logging.getLogger("early")
early.addHandler(logging.StreamHandler())
early.propagate = False
from kvasir import log
log.write_in_background()
late = logging.getLogger("late")
late.addHandler(logging.StreamHandler())
late.propagate = False

def speak(mark):
    for name in ("uvicorn.error", "asyncio", "kvasir.server", "early", "late"):
        logging.getLogger(name).warning("%s by %s", mark, name)
    warnings.warn(f"{mark} by warnings")
    print(f"{mark} by print", file=sys.stderr)
    class Broken:
        def __del__(self): raise ValueError(f"{mark} by a destructor")
    Broken()
    loop = asyncio.new_event_loop()
    loop.call_exception_handler({"message": f"{mark} by a loop"})
    loop.close()

for number in range(int(sys.argv[1])):
    speak(f"line {number}")
print("spoken", flush=True)
sys.stdin.read()
"""
WAYS = ("uvicorn.error", "asyncio", "kvasir.server", "early", "late", "warnings", "print", "a destructor", "a loop")


def speaker(times: int, stderr: int, style: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "always", "-c", SPEAKER, str(times)]
    environment = {**os.environ, "KVASIR_LOG_FORMAT": style}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment)


@pytest.mark.parametrize("style", ["TEXT", "JSON"])
def test_all_packages_write_as_we_do(style: str) -> None:
    process = speaker(1, subprocess.PIPE, style)
    _, written = process.communicate(b"", timeout=60)
    lines = written.decode().splitlines()
    if style == "JSON":
        found = [json.loads(line) for line in lines]
        assert all(each.keys() >= {"time", "level", "logger", "message"} for each in found)
        lines = [each["message"] for each in found]
    for way in WAYS:
        assert sum(f"line 0 by {way}" in line for line in lines) == 1, way


def test_nobody_waits_for_a_reader_that_stands_still() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = speaker(100, writer, "TEXT")
    os.close(writer)
    try:
        assert select.select([process.stdout], [], [], 30)[0], "it waits for the reader"
        assert process.stdout is not None and process.stdout.readline() == b"spoken\n"
    finally:
        process.kill()
        process.communicate()
        os.close(reader)


def test_a_message_of_ours_is_one_line() -> None:
    """An error may repeat a client's text, which must not look like a line of the log, nor move the cursor."""
    text = "no regular expression: (\n2026-01-01 00:00:00 INFO kvasir: forged\r\x1b[2J\u2028end\ttab"
    record = logging.LogRecord("kvasir.server", logging.INFO, "", 0, "%s", (text,), None)
    written = log.handler().format(record)
    assert len(written.splitlines()) == 1 and "\x1b" not in written
    assert r"(\n2026-01-01 00:00:00 INFO kvasir: forged\r\x1b[2J\u2028end" in written and written.endswith("end\ttab")
