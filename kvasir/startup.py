"""How long the parts of this process's start took: what `kvasir bench startup` prints and a server's /ready shows.

Any process. A phase within another takes its time off that one, so that the phases add up to no more than the whole.
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
PROFILE = "memory profile"
KV_CACHE = "KV cache"
FIRST_TOKEN = "first token"

seconds: dict[str, float] = {}  # by phase, in the order in which they began
_inner = [0.0]  # seconds that phases within the current one took, by depth


def note_entry() -> None:
    """Call first in a process: what came before, the interpreter and the imports up to here, is a phase, too."""
    if (before := _since_process_start()) is not None:
        seconds[IMPORTS] = before


def _since_process_start() -> float | None:
    """To a hundredth of a second; None where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time this block. Phases of one name add up."""
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
        logger.debug("start-up: %s took %.2f s", name, own)
