"""Measures how long each phase of a process's start takes, for `kvasir bench startup` and the server's /ready.

Any process. The time of a phase does not include phases within it, so the sum of all phases is at most the total.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvasir.log import get_logger

logger = get_logger(__name__)

IMPORTS = "imports"
DEVICE = "torch and device"
SETTINGS = "settings"
TOKENIZER = "tokenizer"
WEIGHTS = "weights"
WORKERS = "worker processes"
KERNELS = "kernels"
VARIANTS = "search for kernels"
PROFILE = "memory profile"
KV_CACHE = "KV cache"
GRAPHS = "CUDA graphs"
STEPS = "times of steps"
FIRST_TOKEN = "first token"

seconds: dict[str, float] = {}  # phase -> seconds, in the order of their start
_inner = [0.0]  # seconds of the phases within each open phase, by depth


def record_imports() -> None:
    """Record the time since the process started as the phase of imports. Call it first in a process."""
    if (before := _since_process_start()) is not None:
        seconds[IMPORTS] = before


def _since_process_start() -> float | None:
    """Seconds with a resolution of 0.01; None if the system does not report the start."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Measure a block. Times of phases with the same name are added up."""
    began = time.perf_counter()
    seconds.setdefault(name, 0.0)
    _inner.append(0.0)
    try:
        yield
    finally:
        whole = time.perf_counter() - began
        own = whole - _inner.pop()
        _inner[-1] += whole
        seconds[name] += own
        logger.debug("Startup phase %s took %.2f s", name, own)
