"""Measures how busy other processes keep the machine. Plain Python, Linux."""

from __future__ import annotations

import os
import time
from pathlib import Path

LIMIT = 0.06  # of the whole machine: more than this disturbs a measurement
_TICKS = os.sysconf("SC_CLK_TCK")


class Others:
    """While inside: counts what the machine does beside the process `pid` and its children."""

    share = 0.0

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> Others:
        self.began, self.busy, self.own = time.perf_counter(), _busy(), _own(self.pid)
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self.began
        ticks = (_busy() - self.busy) - (_own(self.pid) - self.own)
        self.share = max(0.0, ticks / _TICKS / seconds / (os.cpu_count() or 1))


def wait_until_quiet(patience: float) -> None:
    """Return when a second has passed in which nobody did much, or after `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        with Others(os.getpid()) as others:
            time.sleep(1.0)
        if others.share < LIMIT:
            return


def _busy() -> int:
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return user + nice + system + irq + softirq + steal


def _own(pid: int) -> int:
    """Ticks of a process and its children, those that ended included."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            parents[int(entry)] = int(fields[1]), sum(map(int, fields[11:15]))
        except (ValueError, OSError, IndexError):
            continue
    tree = {pid}
    while more := {child for child, (parent, _) in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(parents[child][1] for child in tree if child in parents)
