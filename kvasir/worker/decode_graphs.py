"""Steps in which every row runs one token, as CUDA graphs: two replays instead of some hundred launches.

A step of n rows is padded to the next size there is a graph for. The forward graph reads which rows run from a fixed
buffer and everything else from the rows on the device; the head graph turns its hidden states into tokens. Graphs are
captured when first needed (about 20 ms) and share one memory pool. Import this where there is a GPU: it brings Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.triton import shared_prefix
from kvasir.kernels.triton.decode_inputs import decode_inputs
from kvasir.messages import StepPlan
from kvasir.sampling.sampler import Sampler
from kvasir.sampling.stages import SampledRows
from kvasir.sampling.state import NO_LINES, Needs
from kvasir.worker.model import Model
from kvasir.worker.rows import DeviceRows, StepInputs

T = TypeVar("T")
ONLY_DRAW = Needs(filters=False, bans=False, logprob_lines=NO_LINES, num_logprobs=0)
BOUNDS = (512, 2048, 1 << 30)  # short sequences need no splitting, so they have graphs of their own


@dataclass(slots=True, frozen=True)
class Shape:
    """What a graph was captured for."""

    size: int  # rows, padding included
    bound: int  # no sequence is longer
    shares: bool  # all sequences share a prefix that is read once


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool


@dataclass(slots=True)
class Forward:
    inputs: StepInputs
    hidden: torch.Tensor


@dataclass(slots=True)
class GraphStats:
    replays: int = 0
    captures: int = 0
    shared_prefix_steps: int = 0


@dataclass(slots=True)
class DecodeGraphs:
    model: Model
    rows: DeviceRows
    sampler: Sampler
    sizes: list[int]
    device: torch.device
    stats: GraphStats = field(default_factory=GraphStats)
    _running: torch.Tensor = field(init=False)  # the rows of the step, padded
    _forwards: dict[Shape, Captured[Forward]] = field(default_factory=dict)
    _heads: dict[Shape, Captured[torch.Tensor]] = field(default_factory=dict)
    _pool: Any = None

    def __post_init__(self) -> None:
        self._running = torch.full((self.sizes[-1],), self.rows.padding, dtype=torch.int64, device=self.device)

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The graph that fits this step, if it is one of single tokens."""
        count = len(plan.rows)
        if plan.num_decodes < count or count > self.sizes[-1]:
            return None
        bound = BOUNDS[bisect_left(BOUNDS, int(plan.bounds.max()))]
        shares = shared_prefix.pays(count, plan.shared_tokens)
        return Shape(self.sizes[bisect_left(self.sizes, count)], bound, shares)

    def padded_rows(self, plan: StepPlan, shape: Shape) -> NDArray[np.int32]:
        return np.pad(plan.rows, (0, shape.size - len(plan.rows)), constant_values=self.rows.padding)

    def forward(self, shape: Shape, padded_rows: torch.Tensor) -> Forward:
        if shape not in self._forwards:
            self._forwards[shape] = self._capture(lambda: self._forward(shape), shape.size)
        self._running[: shape.size] = padded_rows
        self._forwards[shape].graph.replay()
        self.stats.replays += 1
        self.stats.shared_prefix_steps += shape.shares
        return self._forwards[shape].outputs

    def head(self, shape: Shape) -> torch.Tensor:
        """Tokens [size] of the forward replayed last; those of padding rows mean nothing."""
        if shape not in self._heads:
            step = self._forwards[shape].outputs
            self._heads[shape] = self._capture(lambda: self._head(step), shape.size)
        self._heads[shape].graph.replay()
        return self._heads[shape].outputs

    def _forward(self, shape: Shape) -> Forward:
        rows = self._running[: shape.size]
        state = self.rows
        ids, positions, slots, lengths = decode_inputs(
            rows, state.padding, state.num_computed, state.next_token, state.tables, state.block_size
        )
        batch = AttentionBatch(
            slots=slots,
            query_start=torch.arange(shape.size + 1, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            tables=state.tables,
            rows=rows,
            num_decodes=shape.size,
            query_lens=np.ones(shape.size, np.int32),
            seq_bounds=np.full(shape.size, shape.bound, np.int32),
            block_size=state.block_size,
            shared_prefix=state.shared_prefix if shape.shares else None,
        )
        if state.other_tables:
            batch.others = state.batches_of_others(batch, rows, positions)
        return Forward(StepInputs(ids, positions, batch), self.model.forward(ids, positions, batch))

    def _head(self, step: Forward) -> torch.Tensor:
        batch = step.inputs.batch
        lines = SampledRows(NO_LINES, batch.rows, batch.seq_lens)
        return self.sampler.sample(self.model.logits(step.hidden), lines, ONLY_DRAW)

    def _capture(self, run: Callable[[], T], size: int) -> Captured[T]:
        """Run once, so that kernels are compiled, then record. Padding rows only, so that no request is touched."""
        running = self._running[:size].clone()
        self._running[:size] = self.rows.padding
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = run()
            graph.capture_end()
        here.wait_stream(stream)
        self._running[:size] = running
        self.stats.captures += 1
        return Captured(graph, outputs)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the life of the process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)


def graph_sizes(max_rows: int) -> list[int]:
    """Close together where padding costs most of a step: a decode's time grows slowly with its rows."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows] if max_rows <= 1024 else sizes
