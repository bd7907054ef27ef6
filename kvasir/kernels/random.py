"""Stateless random numbers: a uniform number depends on (seed, position) alone, whatever else is in the batch."""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash with low bias (two multiply-xorshift rounds), in int64 so that nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of float64, one for each (seed, position). Both int64, seeds of 32 bits."""
    high = _mix((_mix(seeds) + positions * 0x9E3779B1) & MASK)
    low = _mix(high ^ 0x5BD1E995)
    return (high * 2.0**21 + (low >> 11)) * 2.0**-53
