"""Rotary position embedding: the table of cosines and sines, made once for all layers that rotate alike."""

from __future__ import annotations

import math

import torch

from kvasir.layers.base import Build, WeightLayer
from kvasir.layers.rope import LinearScaling, Llama3Scaling, RopeSpec


class Rotary(WeightLayer):
    """For positions below `max_positions`. Nothing is loaded; `process` computes the table."""

    table: torch.Tensor  # [max_positions, rotary_dim] float32: cosines, then sines

    def __init__(self, build: Build, rope: RopeSpec, max_positions: int) -> None:
        super().__init__()
        self.rope = rope
        table = torch.empty(max_positions, rope.rotary_dim, dtype=torch.float32, device=build.device)
        self.register_buffer("table", table, persistent=False)

    def process(self) -> None:
        positions = torch.arange(len(self.table), dtype=torch.float32, device=self.table.device)
        angles = positions[:, None] * inverse_frequencies(self.rope).to(self.table.device)
        torch.cat((angles.cos(), angles.sin()), dim=-1, out=self.table)


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair of dimensions, [rotary_dim / 2], float32 on the CPU as transformers has it."""
    dim = rope.rotary_dim
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(plain, rope.scaling)
    return plain


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    long = scaling.original_max_positions / scaling.low_freq_factor
    short = scaling.original_max_positions / scaling.high_freq_factor
    slowed = torch.where(wavelength > long, plain / scaling.factor, plain)
    share = scaling.original_max_positions / wavelength - scaling.low_freq_factor
    share = share / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    return torch.where((wavelength >= short) & (wavelength <= long), blended, slowed)
