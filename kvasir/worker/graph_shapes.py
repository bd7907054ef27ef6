"""Which sizes of steps there are graphs for, and what a graph is captured for: few numbers, so that few graphs serve
all steps."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.triton import paged_decode
from kvasir.messages import Int32Array, StepPlan
from kvasir.sampling.stages import Stage
from kvasir.sampling.state import NO_LINES, Needs
from kvasir.worker.shared_prefixes import longest_own

BOUNDS = (512, 2048, 1 << 30)  # short sequences need no splitting, so they have graphs of their own
MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # tokens
MIXED_ROWS = (8, 32, 128, 512, 1024)
LIKELIEST = (0, 1, 2, 5, 10, 20, 32)  # tokens scored beside the drawn one; who wants more goes without a graph


@dataclass(slots=True, frozen=True)
class Shape:
    """What a forward graph was captured for."""

    tokens: int  # padding included
    rows: int  # likewise
    bound: int  # no sequence that runs one token has more of its own
    shares: bool = False  # there are prefixes that are read once for several sequences

    @property
    def is_mixed(self) -> bool:
        """Whether rows may run several tokens."""
        return self.tokens > self.rows

    @property
    def is_ordered(self) -> bool:
        return not self.is_mixed and paged_decode.order_pays(self.rows)


FIRST_STEPS = (Shape(MIXED_SIZES[0], MIXED_ROWS[0], BOUNDS[0]), Shape(1, 1, BOUNDS[0]))  # of a lone short request


@dataclass(slots=True, frozen=True)
class HeadShape:
    """What a head graph was captured for. It reads hidden states and lengths where this one forward leaves them; to
    serve others, they would have to be copied to one place in every step."""

    forward: Shape
    rows: int  # that sample, padding included
    filters: bool = False  # whether some of them ask for min-p, top-k or top-p
    bans: bool = False  # and for stop ids that must not come yet
    stages: tuple[Stage, ...] = ()  # that it runs; some of them ask for some of these
    scored: int = 0  # lines that get log-probabilities, padding included
    likeliest: int = 0  # tokens that are scored beside the drawn one
    named: bool = False  # whether some of the lines name tokens to score
    versions: tuple[int, ...] = ()  # of the tables that it reads, where these may be replaced by larger ones

    @property
    def needs(self) -> Needs:
        """As of a step whose rows ask for everything that this head can do."""
        return Needs(self.filters, self.bans, NO_LINES, self.likeliest, self.stages, self.named)


def fitting_shape(plan: StepPlan, sizes: list[int]) -> Shape | None:
    """The smallest that this step fits, `sizes` being those of steps in which every row runs one token; None: none."""
    count, bound, shares = len(plan.rows), _bound(longest_own(plan)), plan.shared is not None
    if plan.num_decodes == count:
        if count > sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, count)]
        return Shape(size, size, bound, shares)
    if plan.total_tokens > MIXED_SIZES[-1]:
        return None
    size = MIXED_SIZES[bisect_left(MIXED_SIZES, plan.total_tokens)]
    return Shape(size, min(MIXED_ROWS[bisect_left(MIXED_ROWS, count)], size - 1), bound, shares)


def _bound(tokens: int) -> int:
    return BOUNDS[bisect_left(BOUNDS, tokens)]


def padded(values: NDArray[np.int32], size: int, value: int) -> Int32Array:
    return np.pad(values, (0, size - len(values)), constant_values=value)


def longest_first(bounds: NDArray[np.int32], size: int) -> Int32Array:
    """A permutation of the rows of a step; padding comes last."""
    order = np.arange(size, dtype=np.int32)
    order[: len(bounds)] = np.argsort(-bounds, kind="stable")
    return order


def graph_sizes(max_rows: int) -> list[int]:
    """Close together where padding costs most of a step: a decode's time grows slowly with its rows."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows] if max_rows <= 1024 else sizes
