"""Conditions of a benchmark (machine, versions, commit, other load) and plain-text tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvasir import __version__
from kvasir.config.engine import EngineConfig
from kvasir.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


def conditions(config: EngineConfig) -> dict[str, Any]:
    """The conditions of a measurement, apart from the requests."""
    import torch

    return {
        "model": config.model.model,
        "dtype": config.model.dtype,
        "device": config.device.device,
        "hardware": hardware(config.device.device),
        "threads": torch.get_num_threads(),
        "attention_backend": config.device.attention_backend,
        "block_size": config.cache.block_size,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kvasir": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware(device: str) -> str:
    """The product name of the device."""
    if device.partition(":")[0] == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def cpu_name(path: str = "/proc/cpuinfo") -> str:
    """The name of the CPU with family and model, because virtual machines often hide the name."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = fields.get("model name", platform.machine())
    numbers = [f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{name} ({' '.join(numbers)})" if numbers else name


def commit(root: Path = ROOT) -> str | None:
    """The commit of this checkout, with a plus if files were changed; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=10", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30)
    return ran.stdout.strip()


def conditions_line(record: Mapping[str, Any]) -> str:
    """The conditions in one line."""
    code = record["commit"] or "no checkout"
    return (
        f"{record['hardware']}, {record['threads']} threads, {record['dtype']}, torch {record['torch']}, "
        f"kvasir {record['kvasir']} ({code})"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with the first column aligned left and the others right."""
    lines = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def load(shares: Sequence[float | None]) -> str | None:
    """The average load by other processes; a high one makes a measurement unreliable."""
    known = [share for share in shares if share is not None]
    return f"{sum(known) / len(known):.0%}" if known else None


def ratio_line(what: str, ratio: Mapping[str, float], repeat: int) -> str:
    spread = f" ({ratio['min']:.2f} to {ratio['max']:.2f} over {repeat} rounds)" if repeat > 1 else ""
    return f"{what}: {ratio['median']:.2f}x{spread}"


def write_json(path: str, record: Mapping[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}.") from None


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.1f}" if cell >= 100 else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


# ---------------------------------------------------------------- load by other processes (Linux only)


class OtherLoad:
    """Measures the CPU time of other processes from its construction on."""

    def __init__(self) -> None:
        self._busy, self._own, self._started = _busy_seconds(), _own_seconds(), time.perf_counter()

    def fraction(self) -> float | None:
        """Fraction of all cores, 0 to 1, used by processes other than this one and its finished children."""
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
