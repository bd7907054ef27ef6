"""The examples that need a server, without one, and without what they import: a sentence in place of a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CLIENTS = ["streaming_client.py", "many_clients.py", "watch_the_engine.py"]


def ran(name: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, [*([path] if path else []), ROOT]))
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.fixture
def nobody() -> str:
    """The address of a server that is not there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize("name", CLIENTS)
def test_without_a_server(name: str, nobody: str) -> None:
    if name == "streaming_client.py":
        pytest.importorskip("openai")
    process = ran(name, "--url", nobody)
    assert process.returncode == 1
    assert process.stderr == f"No server answers at {nobody}: start one with `kvasir serve`, or set --url.\n"


def test_without_openais_client(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("raise ImportError('it is not installed')\n")
    assert ran("streaming_client.py", "--help", path=tmp_path).returncode == 0
    process = ran("streaming_client.py", path=tmp_path)
    assert process.returncode == 1
    assert process.stderr == "This example uses OpenAI's client: pip install openai\n"


def test_the_quick_start_says_where_the_client_is_from() -> None:
    text = (ROOT / "docs" / "quick_start.md").read_text()
    assert text.index("pip install openai") < text.index("from openai import OpenAI")
