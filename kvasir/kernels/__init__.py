"""One function per operation, whatever the device. Worker process; knows tensors only.

`reference` says in plain torch what each operation means. A version for one kind of device must equal it and is chosen
here, by the tensor's device, so that layers call `kernels.rms_norm(...)` and never ask where they run.
"""

from __future__ import annotations

import torch

from kvasir.kernels import onednn, reference
from kvasir.kernels.reference import ACTIVATIONS, add_rms_norm, gated_activation, rms_norm, rotary, store_kv

__all__ = [
    "ACTIVATIONS",
    "add_rms_norm",
    "gated_activation",
    "linear",
    "pack_weight",
    "rms_norm",
    "rotary",
    "store_kv",
]


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in the form in which `linear` is fastest on its device; only `linear` may read the result."""
    return onednn.pack_weight(weight) if onednn.usable(weight) else weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] (as it is, or packed), plus bias [out]."""
    return onednn.linear(x, weight, bias) if onednn.usable(x) else reference.linear(x, weight, bias)
