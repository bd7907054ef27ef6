"""What a device can do and how much memory it has. Any process; knows no model and no request.

Importing this does not import torch; asking about a device does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvasir.errors import ConfigError

KINDS = ("cuda", "xpu", "mps", "cpu")  # in the order of preference of "auto"
DTYPES = ("float32", "bfloat16", "float16")
_MODEST_KV_BYTES = 4 << 30


class Platform(ABC):
    """One device. Memory is counted in bytes."""

    default_block_size = 16

    def __init__(self, device: str) -> None:
        self.device = device  # as torch spells it: "cpu", "cuda", "cuda:1"
        self.kind = device.partition(":")[0]

    @property
    def has_fp8_e4m3(self) -> bool:
        """Whether its kernels can convert 8-bit floats of this kind."""
        return True

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """The compute capability of an NVIDIA GPU; None for other devices."""
        return None

    @abstractmethod
    def available(self) -> bool:
        """Whether this machine and this build of torch have the device."""

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """All memory of the device that may be used; None if unknown."""

    @abstractmethod
    def memory_free(self) -> int | None:
        """The memory that can still be allocated; None if unknown."""

    @abstractmethod
    def memory_used(self) -> int:
        """The memory that this process holds."""

    @abstractmethod
    def memory_peak(self) -> int:
        """The most this process has held since `reset_memory_peak`, or since its start where that cannot be reset."""

    def default_kv_bytes(self) -> int:
        """A KV cache of modest size, for a device whose memory other programs use too."""
        free = self.memory_free()
        return _MODEST_KV_BYTES if free is None else min(_MODEST_KV_BYTES, free // 2)

    @property
    def default_attention(self) -> str:
        """The attention backend that `auto` means here, apart from the CPU library's (see config.resolve)."""
        return "torch"

    def reset_memory_peak(self) -> None:
        """Begin a new measurement of the peak, where the device can."""
        return None

    def release_memory(self) -> None:
        """Return memory that is cached but not used to the device."""
        return None

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done."""
        return None

    def default_dtype(self, checkpoint_dtype: str) -> str:
        """The dtype that `auto` means here for a checkpoint of this dtype."""
        if checkpoint_dtype not in DTYPES:
            raise ConfigError(
                f"The checkpoint's dtype {checkpoint_dtype!r} is not known; set dtype to one of {', '.join(DTYPES)}."
            )
        return self._settle_dtype(checkpoint_dtype)

    def _settle_dtype(self, checkpoint_dtype: str) -> str:
        return checkpoint_dtype


def select(device: str = "auto") -> Platform:
    """The platform of `device`; "auto" selects the best available one."""
    if device == "auto":
        return next(platform for kind in KINDS if (platform := _platform(kind)).available())
    platform = _platform(device)
    if not platform.available():
        raise ConfigError(
            f"device={device!r} was asked for, but torch finds no such device on this machine; "
            f"use device='auto' or check the driver and the torch build."
        )
    return platform


def _platform(device: str) -> Platform:
    kind, _, index = device.partition(":")
    if kind not in KINDS or (":" in device and not index.isdecimal()):
        raise ConfigError(
            f"device={device!r} is not known; use auto, {', '.join(KINDS)}, or one of them with an index (cuda:1)."
        )
    if kind == "cpu":
        from kvasir.platforms.cpu import CpuPlatform

        return CpuPlatform(device)
    if kind == "mps":
        from kvasir.platforms.gpu import MpsPlatform

        return MpsPlatform(device)
    from kvasir.platforms.gpu import CudaPlatform

    return CudaPlatform(device)
