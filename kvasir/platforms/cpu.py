"""The CPU as a device, and checks of it before torch is imported. Plain Python.

Its memory is the machine's, or the container's limit if that is lower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from kvasir.log import get_logger
from kvasir.platforms import Platform, limits

logger = get_logger(__name__)


class CpuPlatform(Platform):
    def available(self) -> bool:
        return True

    def memory_bytes(self) -> int | None:
        known = [_physical(), limits.memory_limit()]
        return min((n for n in known if n is not None), default=None)

    def memory_free(self) -> int | None:
        """Free memory, including page cache that the kernel can reclaim."""
        available = limits.field(Path("/proc/meminfo"), "MemAvailable:")
        known = [None if available is None else available * 1024, limits.memory_left()]
        return min((n for n in known if n is not None), default=None)

    def memory_used(self) -> int:
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return self.memory_peak()  # without /proc the peak is the best estimate

    def memory_peak(self) -> int:
        import resource  # Windows has none

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def _settle_dtype(self, checkpoint_dtype: str) -> str:
        # Measured: a product of 32 rows takes six times as long in float16 as in bfloat16.
        return "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


# ---------------------------------------------------------------- before torch is imported
# Some virtual machines announce AMX but leave its description (CPUID leaf 0x1D) empty. oneDNN reads the tile layout
# there and crashes with SIGILL at its first bfloat16 matmul, so on such machines it is configured not to use AMX.

# void cpuid(uint32 leaf /* edi */, uint32 subleaf /* esi */, uint32 out[4] /* rdx */), System V calling convention
_CPUID = bytes.fromhex(
    "53"  # push rbx
    "4989d0"  # mov r8, rdx
    "89f8 89f1 0fa2"  # mov eax, edi; mov ecx, esi; cpuid
    "418900 41895804 41894808 4189500c"  # mov [r8], eax; [r8+4], ebx; [r8+8], ecx; [r8+12], edx
    "5bc3"  # pop rbx; ret
)
TILE_LEAF = 0x1D
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is the older name
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"

Registers = tuple[int, int, int, int]  # eax, ebx, ecx, edx


def prepare_cpu() -> None:
    """Set environment variables that oneDNN reads. A process that runs a model calls this before importing torch."""
    if any(name in os.environ for name in ISA_VARIABLES):
        return
    if amx_lacks_description(cpu_flags(), cpuid):
        os.environ[ISA_VARIABLES[0]] = ISA_WITHOUT_AMX
        logger.warning(
            "This machine announces AMX but shows no description of it (CPUID leaf 0x1D): oneDNN is kept to %s. "
            "Set %s to decide otherwise.",
            ISA_WITHOUT_AMX,
            ISA_VARIABLES[0],
        )


def amx_lacks_description(flags: Collection[str], read: Callable[[int, int], Registers | None]) -> bool:
    """Whether AMX is announced while palette 1, the only one, reads as zeros. True if it cannot be read: a slower
    product is better than an illegal instruction."""
    if "amx_tile" not in flags:
        return False
    registers = read(TILE_LEAF, 1)
    return registers is None or not any(registers)


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The CPU's features by their names in Linux; empty without such a file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def cpuid(leaf: int, subleaf: int) -> Registers | None:
    """The CPUID instruction on Linux on x86-64; None elsewhere, or where memory may not be executed."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    code.write(_CPUID)
    registers = (ctypes.c_uint32 * 4)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)(
        leaf, subleaf, ctypes.addressof(registers)
    )
    eax, ebx, ecx, edx = registers
    return eax, ebx, ecx, edx
