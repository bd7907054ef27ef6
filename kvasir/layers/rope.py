"""How positions turn into angles: plain numbers, hashable, so that equal ones share a table. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones are kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` dimensions of each head."""

    rotary_dim: int
    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | None = None
