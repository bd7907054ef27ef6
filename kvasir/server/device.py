"""Utilization and memory of the engine's device, for the metrics: from NVML on NVIDIA GPUs, from /proc on the CPU.

API process, so without torch: NVML is called through its C library. Other devices have no such figures.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.log import get_logger

logger = get_logger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceUse:
    name: str
    utilization: float  # 0 to 1
    memory_used: int  # bytes
    memory_total: int


Probe = Callable[[], list[DeviceUse]]


def probe_for(device: str) -> Probe:
    """The probe of the device that the engine runs on; `device` is its resolved setting."""
    if device.startswith("cuda"):
        try:
            return NvmlProbe(visible_devices(device, os.environ.get("CUDA_VISIBLE_DEVICES")))
        except OSError as error:
            logger.warning("the metrics have no GPU figures: %s", error)
    elif device == "cpu" and Path("/proc/stat").exists():
        return CpuProbe()
    return list


def visible_devices(device: str, variable: str | None) -> list[str] | None:
    """Numbers or UUIDs of the GPUs that the engine may use; None: all."""
    names = None if variable is None else [name.strip() for name in variable.split(",") if name.strip()]
    _, _, number = device.partition(":")
    if not number:
        return names
    return [number] if names is None else names[int(number) : int(number) + 1]


class CpuProbe:
    """The whole machine: share of CPU time since the last call, memory that is not available."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._times()

    def __call__(self) -> list[DeviceUse]:
        busy, total = self._times()
        before_busy, before_total = self._last
        self._last = busy, total
        share = (busy - before_busy) / max(1, total - before_total)
        memory = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            memory[name] = int(value.split()[0]) * 1024
        used = memory["MemTotal"] - memory["MemAvailable"]
        return [DeviceUse("cpu", min(1.0, max(0.0, share)), used, memory["MemTotal"])]

    def _times(self) -> tuple[int, int]:
        fields = [int(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]  # idle, and waiting for a disk
        return sum(fields) - idle, sum(fields)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlProbe:
    """Raises OSError if the library is missing or does not start."""

    def __init__(self, devices: list[str] | None) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._nvml.nvmlInit_v2())
        self._handles = [(name, self._handle(name)) for name in (self._all() if devices is None else devices)]

    def __call__(self) -> list[DeviceUse]:
        return [self._probe(name, handle) for name, handle in self._handles]

    def _all(self) -> list[str]:
        count = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return [str(number) for number in range(count.value)]

    def _handle(self, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle)))
        else:
            self._check(self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
        return handle

    def _probe(self, name: str, handle: ctypes.c_void_p) -> DeviceUse:
        use, memory = _Utilization(), _Memory()
        self._check(self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)))
        self._check(self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
        return DeviceUse(name, use.gpu / 100, memory.used, memory.total)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"NVML answered with error {code}")
