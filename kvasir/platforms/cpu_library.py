"""Kvasir's own library for the CPU (csrc/cpu), where it was built: found, loaded and set up here. No torch.

Without it everything runs on plain torch. `python -m kvasir.kernels.cpu.build` builds it in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvasir.errors import ConfigError
from kvasir.log import get_logger
from kvasir.platforms.cpu_sources import NAME, fingerprint
from kvasir.platforms.cpu_structs import layout

logger = get_logger(__name__)

PATH = Path(__file__).parent.parent / "kernels" / "cpu" / NAME


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where there is none that can be used, which is said once."""
    try:
        found = ctypes.CDLL(str(PATH))
        _declare(found)
    except (OSError, AttributeError) as error:
        why = "is not built" if not PATH.is_file() else f"cannot be loaded ({error})"
        logger.warning(
            "The CPU library %s: models run on plain torch, slower. With a C++ compiler, "
            "`python -m kvasir.kernels.cpu.build` builds it.",
            why,
        )
        return None
    return found


def _declare(found: ctypes.CDLL) -> None:
    """Say what its functions return, and make sure that it is the one this code was written for."""
    for name in ("kv_instruction_set", "kv_instruction_sets", "kv_sources"):
        getattr(found, name).restype = ctypes.c_char_p
    found.kv_layout.restype = ctypes.c_int64
    sources = fingerprint()
    if found.kv_layout() != layout() or (sources is not None and found.kv_sources() != sources.encode()):
        raise OSError("it was built from other sources")


def loaded() -> ctypes.CDLL:
    """The library, where somebody made sure that there is one."""
    found = library()
    assert found is not None, "the CPU library is not there"
    return found


def instruction_sets() -> list[str]:
    """All that this CPU can run, best first."""
    names: bytes = loaded().kv_instruction_sets()
    return names.decode().split()


def instruction_set() -> str:
    name: bytes = loaded().kv_instruction_set()
    return name.decode()


def use_instruction_set(name: str) -> None:
    if not loaded().kv_use_instruction_set(name.encode()):
        raise ValueError(f"This CPU cannot run {name!r}; it can run {', '.join(instruction_sets())}.")


def configure(threads: int, cpus: Sequence[int] | None = None) -> None:
    """How many threads compute, and on which CPUs they are; without a list, on those the process may use. They are the
    process's: of two engines in it, both use what was said last."""
    bound = (ctypes.c_int32 * threads)(*(cpus[i % len(cpus)] for i in range(threads))) if cpus else None
    granted = loaded().kv_configure(threads, bound)
    if granted < threads:
        raise ConfigError(
            f"cpu_threads={threads}: the system starts no more than {granted} threads; lower cpu_threads, or raise the "
            "limit on processes (ulimit -u, a container's pids limit) or on memory."
        )


def num_threads() -> int:
    return int(loaded().kv_threads())
