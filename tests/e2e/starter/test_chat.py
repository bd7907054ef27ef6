"""`kvasir chat` as a person runs it: with a model in the process, and with a server."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.starter.conftest import scripted
from tests.server_process import LiveServer
from tests.unit.chat.test_session import Window

SECONDS = 300
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def chat(*flags: str, typed: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {"FORCE_COLOR": "", "COLUMNS": "200"}  # whatever those who run tests prefer
    env = os.environ | plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "kvasir", "chat", *flags]
    return subprocess.run(command, input=typed or "", capture_output=True, text=True, env=env, timeout=SECONDS)


def test_a_question_to_the_starter_model(starter_model: Path) -> None:
    ran = chat("-q", "What is the capital of France?", "--max-model-len", "512")
    assert ran.returncode == 0 and "Paris" in ran.stdout, ran.stderr
    assert "INFO" not in ran.stderr and "Loading" not in ran.stderr, "the answer, and no log"


def test_a_conversation_with_a_server(real_server: LiveServer) -> None:
    typed = "/params temperature=0 max_tokens=24\nWhat is the capital of France?\n/stats\n/params topp=1\n"
    ran = chat("--url", f"{real_server.url}/v1", typed=typed)
    assert ran.returncode == 0 and "Paris" in ran.stdout, ran.stderr
    assert "last reply: " in ran.stdout and f"server: {real_server.url}/v1" in ran.stdout
    assert "Did you mean top_p" in ran.stdout


def test_a_server_that_wants_a_key(locked_server: LiveServer) -> None:
    url = f"{locked_server.url}/v1"
    ran = chat("--url", url, "-q", "hello")
    assert ran.returncode == 2 and "The server needs an API key" in ran.stderr
    assert chat("--url", url, "--api-key", "sesame", "-q", "hello").returncode == 0
    assert chat("--url", url, "-q", "hello", KVASIR_API_KEY="sesame").returncode == 0
    ran = chat("--url", url, "--api-key", "sesame", "--model-name", "other", "-q", "hello")
    assert ran.returncode == 1 and "does not exist here" in ran.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--url", "http://127.0.0.1:9/v1"],
            "start one with `kvasir serve`, or set --url",
        ),
        (["--url", "localhost"], "is not a URL such as http://localhost:8000/v1"),
        (["--api-key", "k"], "need a server; add --url"),
        (["nowhere.gguf"], "there is no such file"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], said: str) -> None:
    ran = chat(*flags, "-q", "hello")
    assert ran.returncode == 2
    assert said in ran.stderr and ran.stderr.count("\n") == 1 and ran.stderr.startswith("kvasir: error: ")


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(scripted_server: LiveServer, tmp_path: Path) -> None:
    with on_a_terminal(scripted_server, tmp_path) as (controller, process):
        seen = _until(controller, "> ")
        os.write(controller, b"Tell me about the sea.\n")
        seen = _until(controller, "the ship is small", seen)
        process.send_signal(signal.SIGINT)
        seen = _until(controller, "stopped", seen)
        os.write(controller, b"/stats\n")
        seen = _until(controller, "server: ", seen)
        assert _leave(controller, process) == 0
    assert "Traceback" not in seen
    assert "Tell me about the sea." in (tmp_path / "kvasir" / "chat_history").read_text()


CODE = [f"x{number} = {number}" for number in range(400)]


@pytest.fixture(scope="module")
def coding_server(starter_model: Path) -> Iterator[LiveServer]:
    """Answers with more code than anybody waits for."""
    with scripted(starter_model, "Look:\n```python\n" + "\n".join(CODE)) as server:
        yield server.wait_until_ready()


@pytest.mark.slow
def test_code_taller_than_the_window_and_ctrl_c_inside_of_it(coding_server: LiveServer, tmp_path: Path) -> None:
    """Lines come while the block goes on, and all of them stay; after Ctrl-C the screen is that of any conversation."""
    window = Window(width=60, height=8)
    with on_a_terminal(coding_server, tmp_path, window) as (controller, process):
        settings = termios.tcgetattr(controller)
        seen = _until(controller, "> ")
        os.write(controller, b"Write code.\n")
        seen = _until(controller, CODE[25], seen)  # long before the block ends
        process.send_signal(signal.SIGINT)
        seen = _until(controller, "stopped", seen)
        os.write(controller, b"/stats\n")
        seen = _until(controller, "server: ", seen)
        assert _leave(controller, process) == 0
        assert termios.tcgetattr(controller) == settings
    window.write(COLOUR.sub("", seen).replace("\x1b[?2004h", "").replace("\x1b[?2004l", ""))  # readline's pasting
    shown = window.texts()
    lines = [line for line in shown if re.fullmatch(r"x\d+ = \d*", line)]
    assert len(lines) > 25 and [*lines[:-1]] == CODE[: len(lines) - 1], "every line once, the last perhaps in part"
    assert CODE[len(lines) - 1].startswith(lines[-1])
    assert shown[shown.index(lines[-1]) + 1] == "stopped" and window.cursor_visible
    assert "Traceback" not in seen


@contextmanager
def on_a_terminal(
    server: LiveServer, folder: Path, window: Window | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`kvasir chat` with a terminal: the terminal's other end, and the process."""
    controller, terminal = pty.openpty()
    if window is not None:
        termios.tcsetwinsize(terminal, (window.height, window.console.width))
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "XDG_STATE_HOME": str(folder)}
    for name in ("COLUMNS", "LINES"):  # they would win over the terminal's size
        env.pop(name, None)
    command = [sys.executable, "-m", "kvasir", "chat", "--url", f"{server.url}/v1"]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True
    )
    try:
        yield controller, process
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(terminal)


def _leave(controller: int, process: subprocess.Popen[bytes]) -> int:
    """Ctrl-D, again if it came before the prompt was there to take it."""
    end = time.monotonic() + SECONDS
    while True:
        os.write(controller, b"\x04")
        try:
            return process.wait(2)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < end, "Ctrl-D does not end the chat"


def _until(controller: int, text: str, seen: str = "") -> str:
    """Reads the terminal until the text is on it, in whatever colours."""
    start, end = len(seen), time.monotonic() + SECONDS
    while text not in COLOUR.sub("", seen[start:]):
        assert time.monotonic() < end, f"{text!r} is not in {seen!r}"
        if select.select([controller], [], [], 1)[0]:
            seen += os.read(controller, 65536).decode("utf-8", "replace")
    return seen
