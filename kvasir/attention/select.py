"""Attention backends by name. Worker process; which name `auto` means is the platform's to say."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.attention.base import AttentionBackend
from kvasir.errors import ConfigError


def _torch() -> AttentionBackend:
    from kvasir.attention.torch import TorchAttention

    return TorchAttention()


def _triton() -> AttentionBackend:
    from kvasir.attention.triton import TritonAttention

    return TritonAttention()


def _cpu() -> AttentionBackend:
    from kvasir.attention.cpu import CpuAttention

    return CpuAttention()


# Imported on use: a backend may need a library that is not installed.
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": _torch, "triton": _triton, "cpu": _cpu}


def select(name: str) -> AttentionBackend:
    """The backend of this name."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is not known; there is {', '.join(_BACKENDS)}.")
    return _BACKENDS[name]()
