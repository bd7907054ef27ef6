"""Keys of graphs: which step sizes have graphs, and what a graph is captured for. A key holds few numbers, so that few
graphs serve all steps. Worker process; imports Triton."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvasir.kernels.layout import max_unshared_tokens
from kvasir.kernels.triton import paged_decode
from kvasir.messages import StepPlan
from kvasir.sampling.features import Uses
from kvasir.worker.step_inputs import UNBOUNDED

BOUNDS = (512, 2048, UNBOUNDED)  # short sequences need no splitting, so they have graphs of their own
MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # tokens
MIXED_ROWS = (8, 32, 128, 512, 1024)


@dataclass(slots=True, frozen=True)
class ForwardGraphKey:
    """What a forward graph is captured for."""

    tokens: int  # padding included
    rows: int  # padding included
    bound: int  # upper bound of the unshared tokens of a sequence that runs one token
    shares: bool = False  # some sequences share a prefix that is read once

    @property
    def is_mixed(self) -> bool:
        """Whether rows may run several tokens."""
        return self.tokens > self.rows

    @property
    def is_ordered(self) -> bool:
        """Whether the longest sequences are started first."""
        return not self.is_mixed and paged_decode.order_pays(self.rows)


# The first steps of a single short request.
FIRST_STEPS = (ForwardGraphKey(MIXED_SIZES[0], MIXED_ROWS[0], BOUNDS[0]), ForwardGraphKey(1, 1, BOUNDS[0]))


@dataclass(slots=True, frozen=True)
class HeadGraphKey:
    """What a head graph is captured for. It reads hidden states and lengths where one forward graph leaves them; to
    serve others, they would have to be copied to one place in every step."""

    forward: ForwardGraphKey
    rows: int  # that sample, padding included
    uses: Uses = ()  # features that it runs
    versions: tuple[int, ...] = ()  # of the tables that those read


def fitting_key(plan: StepPlan, sizes: list[int]) -> ForwardGraphKey | None:
    """The smallest graph that this step fits, or None. `sizes` are those of steps in which every row runs one token."""
    count, bound, shares = len(plan.rows), _bound(max_unshared_tokens(plan)), plan.shared is not None
    if plan.num_decodes == count:
        if count > sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, count)]
        return ForwardGraphKey(size, size, bound, shares)
    if plan.total_tokens > MIXED_SIZES[-1]:
        return None
    size = MIXED_SIZES[bisect_left(MIXED_SIZES, plan.total_tokens)]
    return ForwardGraphKey(size, min(MIXED_ROWS[bisect_left(MIXED_ROWS, count)], size - 1), bound, shares)


def _bound(tokens: int) -> int:
    return BOUNDS[bisect_left(BOUNDS, tokens)]


def graph_sizes(max_rows: int) -> list[int]:
    """Sizes of steps of single tokens. They are close together where padding costs most of a step: a decode's time
    grows slowly with its rows."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows] if max_rows <= 1024 else sizes
