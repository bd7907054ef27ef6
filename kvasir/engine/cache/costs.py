"""Whether a preempted request's blocks are worth moving to the host and back, or are computed again. Core process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvasir.messages import StepCosts


class SwapChoice(Protocol):
    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and in again is better than computing `num_tokens`."""


@dataclass(slots=True, frozen=True)
class Always:
    """Somebody has decided already."""

    answer: bool

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        return self.answer


@dataclass(slots=True, frozen=True)
class CostModel:
    """Seconds against seconds, as the worker has measured them.

    Both sides are on the careful side of what they cost in truth: copies run beside the step, and blocks that nobody
    takes meanwhile are never moved at all; tokens computed late in a text cost more than those the worker timed.
    """

    costs: StepCosts

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        return 2 * num_blocks * self.costs.copy_block < num_tokens * self.costs.compute_token
