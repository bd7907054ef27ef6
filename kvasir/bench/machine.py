"""How much of the machine other processes have while something is measured. Linux; elsewhere nobody knows."""

from __future__ import annotations

import os
import time


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._busy, self._own, self._started = _busy_seconds(), _own_seconds(), time.perf_counter()

    def others(self) -> float | None:
        """The share of all cores, 0 to 1, that neither this process had nor children that it has waited for."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        foreign = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, foreign) / (time.perf_counter() - self._started) / (os.cpu_count() or 1)


def _busy_seconds() -> float | None:
    """CPU seconds of all processes since boot."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, steal = (int(word) for word in file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
