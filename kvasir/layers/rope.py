"""Rotary position embedding: the tables of cosines and sines. Layers with the same RopeSpec share one."""

from __future__ import annotations

import math

import torch

from kvasir.layers.base import Build, DecoderBuild, WeightLayer
from kvasir.layers.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


class Rotary(WeightLayer):
    """The table for positions below `max_positions`. Nothing is loaded; `process` computes it."""

    table: torch.Tensor  # [max_positions, rotary_dim] float32: cosines, then sines

    def __init__(self, build: Build, rope: RopeSpec, max_positions: int) -> None:
        super().__init__()
        self.rope = rope
        table = torch.empty(max_positions, rope.rotary_dim, dtype=torch.float32, device=build.device)
        self.register_buffer("table", table, persistent=False)

    def process(self) -> None:
        count = len(self.table)
        positions = torch.arange(count, dtype=torch.float32, device=self.table.device)
        angles = positions[:, None] * inverse_frequencies(self.rope, count).to(self.table.device)
        torch.cat((angles.cos(), angles.sin()), dim=-1, out=self.table)
        self.table *= getattr(self.rope.scaling, "attention_factor", 1.0)


def rotary_for(build: DecoderBuild, rope: RopeSpec | None) -> Rotary | None:
    """The decoder's table for this spec, made on first use."""
    if rope is None:
        return None
    if rope not in build.rotaries:
        build.rotaries[rope] = Rotary(build, rope, build.max_positions)
    found = build.rotaries[rope]
    assert isinstance(found, Rotary)
    return found


def inverse_frequencies(rope: RopeSpec, max_positions: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, [rotary_dim / 2], or [max_positions, rotary_dim / 2] where it
    depends on the position; computed in float32 on the CPU as in transformers."""
    plain = 1.0 / _wavelengths(rope.theta, rope.rotary_dim)
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(rope, rope.scaling)
        case DynamicScaling():
            return _dynamic(rope, rope.scaling, max_positions)
        case LongRopeScaling():
            long = max_positions > rope.scaling.original_max_positions
            return plain / torch.tensor(rope.scaling.long_factor if long else rope.scaling.short_factor)
    return plain


def _wavelengths(theta: float | torch.Tensor, dim: int) -> torch.Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    long = scaling.original_max_positions / scaling.low_freq_factor
    short = scaling.original_max_positions / scaling.high_freq_factor
    slowed = torch.where(wavelength > long, plain / scaling.factor, plain)
    share = scaling.original_max_positions / wavelength - scaling.low_freq_factor
    share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    return torch.where((wavelength >= short) & (wavelength <= long), blended, slowed)


def _yarn(rope: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        """The pair of dimensions that makes this many turns over the trained length."""
        return dim * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    wavelengths = _wavelengths(rope.theta, dim)
    return slowed / (scaling.factor * wavelengths) + (1 - slowed) / wavelengths


def _dynamic(rope: RopeSpec, scaling: DynamicScaling, max_positions: int) -> torch.Tensor:
    """Every token is rotated as for a text that ends with it, as transformers does when it generates with a cache: a
    token's key does not depend on the tokens after it, so it can be cached."""
    dim, trained = rope.rotary_dim, scaling.original_max_positions
    length = torch.arange(1, max_positions + 1, dtype=torch.float32).clamp(min=trained)
    growth = (scaling.factor * length / trained - (scaling.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _wavelengths((rope.theta * growth)[:, None], dim)
