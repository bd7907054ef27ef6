"""Attention backends by name. Worker process; the platform decides which name `auto` stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvasir import platforms
from kvasir.attention.base import AttentionBackend
from kvasir.errors import ConfigError
from kvasir.platforms import attention_packages


def _torch(device: torch.device) -> AttentionBackend:
    from kvasir.attention.torch import TorchAttention

    return TorchAttention()


def _triton(device: torch.device) -> AttentionBackend:
    from kvasir.attention.triton import TritonAttention

    return TritonAttention()


def _cpu(device: torch.device) -> AttentionBackend:
    from kvasir.attention.cpu import CpuAttention

    return CpuAttention()


def _flash_attn(device: torch.device) -> AttentionBackend:
    from kvasir.attention.flash_attn import FlashAttention

    return FlashAttention(attention_packages.require("flash_attn", platforms.select(str(device))))


def _flashinfer(device: torch.device) -> AttentionBackend:
    from kvasir.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(device)


# Imported on use: a backend may need a library that is not installed.
_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch": _torch,
    "triton": _triton,
    "cpu": _cpu,
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
}


def select(name: str, device: torch.device) -> AttentionBackend:
    """The backend of this name, for one device."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is not known; there is {', '.join(_BACKENDS)}.")
    return _BACKENDS[name](device)
