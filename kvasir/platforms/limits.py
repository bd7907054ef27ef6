"""What this process may use of the machine: CPUs by affinity, quota and OMP_NUM_THREADS, memory by control groups.

A container's limits are in its control group, a service's in a group below it; the limits of all outer groups apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvasir.errors import ConfigError

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# File names of limit and usage in version 2 and in version 1 of control groups.
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


# ---------------------------------------------------------------- CPUs


def allowed_cpus() -> int:
    """Number of CPUs this process may use by its affinity and its quota."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return known if quota is None else min(known, max(1, round(quota)))


def usable_cpus() -> int:
    """Number of CPUs for threads that compute a model or its like: `allowed_cpus`, or OMP_NUM_THREADS if that is
    less."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    openmp = int(text) if text.isdecimal() else 0
    return min(allowed_cpus(), openmp) if openmp > 0 else allowed_cpus()


def parse_cpus(text: str) -> list[int]:
    """The CPUs of a list as Linux writes it: "0-3,8"."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(f"cpu_bind={text!r} is no list of CPUs; write numbers and ranges, such as 0-3,8.")
        cpus += range(int(first), int(last) + 1)
    if len(set(cpus)) < len(cpus):
        raise ConfigError(f"cpu_bind={text!r} names a CPU twice.")
    if hasattr(os, "sched_getaffinity") and (missing := set(cpus) - os.sched_getaffinity(0)):
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"cpu_bind={text!r} names CPU {min(missing)}, which this process may not use; it may: {allowed}."
        )
    return cpus


def share(cpus: list[int], index: int, size: int) -> list[int]:
    """The CPUs of one of several workers: neighbours, so that a worker stays on one memory node."""
    each = max(1, len(cpus) // size)
    begin = index * each % len(cpus)
    return cpus[begin : begin + each]


def cpu_quota() -> float | None:
    """The CPU quota, in CPUs; None without one."""
    return min((quota for group in _groups("cpu") if (quota := _quota(group)) is not None), default=None)


def _quota(group: Path) -> float | None:
    try:
        limit, period = (group / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        limits = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return limits[0] / limits[1] if limits[0] and limits[1] else None


# ---------------------------------------------------------------- memory


def memory_limit() -> int | None:
    limits = (_number(group / limit) for group in _groups("memory") for limit, _ in _MEMORY)
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left() -> int | None:
    """The least memory that any group leaves, including page cache that the kernel can reclaim."""
    left = (_left(group, *names) for group in _groups("memory") for names in _MEMORY)
    return min((each for each in left if each is not None), default=None)


def _left(group: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _number(group / limit_name), _number(group / used_name)
    if limit is None or used is None:
        return None
    # Inactive page cache counts as used but is reclaimed when memory is short.
    return max(0, limit - used + (field(group / "memory.stat", "inactive_file") or 0))


# ---------------------------------------------------------------- files


def _groups(controller: str) -> Iterator[Path]:
    """This process's control groups, from its own up to the outermost visible one."""
    yield from (_ROOT, _ROOT / controller)
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = _ROOT / controller if controllers else _ROOT  # version 2 has one tree for all controllers
        if controllers and controller not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        while group != base and base in group.parents:
            yield group
            group = group.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def field(path: Path, name: str) -> int | None:
    """The number after a name in a file such as /proc/meminfo."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
