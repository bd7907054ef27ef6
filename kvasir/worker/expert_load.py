"""Counts which experts tokens are sent to, layer by layer, on the device. Worker process.

Experts are counted in ranges of neighbours, at most eight a layer, as expert parallelism divides them: one figure for
each expert of each layer would be thousands.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kvasir.layers.mlp import ExpertTally, MoE
from kvasir.messages import ExpertTokens

_MOST_RANGES = 8
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ExpertLoad:
    """The counts of one model, which its layers add to."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found = [(path, module) for path, module in model.named_modules() if isinstance(module, MoE)]
        self.layers = tuple(int(match.group(1)) for path, _ in found if (match := _LAYER.search(f"{path}.")))
        assert len(self.layers) == len(found), "every mixture belongs to a layer"
        most = max((module.experts.shape.num_experts for _, module in found), default=1)
        width = -(-most // _MOST_RANGES)
        self.ranges = tuple(_named(first, min(first + width, most)) for first in range(0, most, width))
        self._counts = torch.zeros(len(found), len(self.ranges), dtype=torch.int64, device=device)
        for counts, (_, module) in zip(self._counts, found, strict=True):
            module.tally = ExpertTally(counts, width)

    def take(self) -> torch.Tensor:
        """Return the counts since the last call, [layers, ranges]. Nothing waits for the device."""
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def result(self, counts: NDArray[np.int64]) -> ExpertTokens:
        return ExpertTokens(self.layers, self.ranges, counts)


def expert_load_of(model: nn.Module, device: torch.device) -> ExpertLoad | None:
    """Return the counts of the model's experts; None if it has none that Kvasir's own layers compute."""
    found = ExpertLoad(model, device)
    return found if found.layers else None


def _named(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"
