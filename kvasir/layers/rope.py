"""How positions turn into angles: plain numbers, hashable, so that equal ones share a table. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Past the trained length the base grows with the position."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones are kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Dimensions that turn seldom are slowed by `factor`, those that turn often kept, those between blended; the
    cosines and sines are multiplied by `attention_factor`."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """A factor of its own for every pair of dimensions: the long ones where the engine is built for more positions
    than the model was first trained on, the short ones elsewhere."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` dimensions of each head."""

    rotary_dim: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    interleaved: bool = False  # a pair is two neighbours, not one of either half
