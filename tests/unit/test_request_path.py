"""The files that a streamed chat request runs through: as many as a reader can follow, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MAX_FILES, MAX_LINES, MAX_RUN_LINES = 37, 10_900, 3_650


def test_the_path_of_a_request_stays_short() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "request_path.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    *rows, empty, total = ran.stdout.splitlines()
    files = [row.split()[1] for row in rows]
    assert not empty and total.startswith(f"{len(files)} files, ")
    # both processes are traced, from the gate to the engine and back
    for expected in ("server/gate.py", "server/routes/chat.py", "engine/scheduler.py", "server/event_stream.py"):
        assert f"kvasir/{expected}" in files
    assert files[0] == "kvasir/server/gate.py" and "kvasir/server/lifecycle.py" not in files
    num_lines, num_run = (int(part.split()[0].replace(",", "")) for part in total.split(", ")[1:])
    assert len(files) <= MAX_FILES, ran.stdout
    assert num_lines <= MAX_LINES, ran.stdout
    assert 0 < num_run <= MAX_RUN_LINES, ran.stdout
