"""The CPU as a device: its memory is the machine's, or the container's where that is less."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from kvasir.errors import ConfigError
from kvasir.platforms import Platform, cpu_library

# Limit, use and details of the container's memory: control groups version 2, then version 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


class CpuPlatform(Platform):
    def available(self) -> bool:
        return True

    def default_attention(self, dtype: str) -> str:
        """The library runs bfloat16; float32 is torch's."""
        return "cpu" if dtype == "bfloat16" and cpu_library.library() is not None else "torch"

    def memory_bytes(self) -> int | None:
        known = [_physical(), *(_number(limit) for limit, _, _ in _CGROUPS)]
        return min((n for n in known if n is not None), default=None)

    def memory_free(self) -> int | None:
        """Free memory, counting page cache that the kernel would give up."""
        known = [_field("/proc/meminfo", "MemAvailable:", 1024), *(_container_free(*paths) for paths in _CGROUPS)]
        return min((n for n in known if n is not None), default=None)

    def memory_used(self) -> int:
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return self.memory_peak()  # no /proc: the peak is the nearest thing there is

    def memory_peak(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def _settle_dtype(self, checkpoint_dtype: str) -> str:
        # Measured: a product of 32 rows takes six times as long in float16 as in bfloat16.
        return "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype


def usable_cpus() -> int:
    """How many CPUs this process may use: by its affinity, its container's quota, and OMP_NUM_THREADS where set."""
    known = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    known += [max(1, round(limit)) for limit in (_quota(), _told()) if limit is not None]
    return min(known)


def _told() -> float | None:
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return float(text) if text.isdecimal() and int(text) > 0 else None


def _quota(
    paths: tuple[str, str, str] = (
        "/sys/fs/cgroup/cpu.max",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us",
    ),
) -> float | None:
    """The container's limit in CPUs: control groups version 2, then version 1."""
    try:
        limit, period = Path(paths[0]).read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        limits = _number(paths[1]), _number(paths[2])
        return limits[0] / limits[1] if limits[0] and limits[1] else None


def parse_cpus(text: str) -> list[int]:
    """CPUs as Linux writes them: "0-3,8"."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ConfigError(f"cpu_bind={text!r} is no list of CPUs; write numbers and ranges, such as 0-3,8.")
        cpus += range(int(first), int(last) + 1)
    if hasattr(os, "sched_getaffinity") and (missing := set(cpus) - os.sched_getaffinity(0)):
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"cpu_bind={text!r} names CPU {min(missing)}, which this process may not use; it may: {allowed}."
        )
    return cpus


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _container_free(limit_path: str, used_path: str, stat_path: str) -> int | None:
    limit, used = _number(limit_path), _number(used_path)
    if limit is None or used is None:
        return None
    # Inactive page cache counts as used but is given up when memory is short.
    return max(0, limit - used + (_field(stat_path, "inactive_file", 1) or 0))


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def _field(path: str, name: str, unit: int) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(f"{name} ")), None)
