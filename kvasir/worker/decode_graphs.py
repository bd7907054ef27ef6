"""Steps in which every row runs one token, as CUDA graphs: two replays instead of some hundred launches.

A step of n rows is padded to the next captured size. The forward graph reads which rows run from a fixed buffer and
everything else from the rows on the device; the head graph turns its hidden states into tokens. Graphs are captured
when a size is first needed (about 20 ms) and share one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.triton.decode_inputs import decode_inputs
from kvasir.messages import StepPlan
from kvasir.sampling.sampler import Sampler
from kvasir.sampling.state import NO_LINES, Needs
from kvasir.worker.rows import DeviceRows, StepInputs

T = TypeVar("T")
ONLY_DRAW = Needs(filters=False, bans=False, logprob_lines=NO_LINES, num_logprobs=0)


class Model(Protocol):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


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


@dataclass(slots=True)
class DecodeGraphs:
    model: Model
    rows: DeviceRows
    sampler: Sampler
    sizes: list[int]
    device: torch.device
    stats: GraphStats = field(default_factory=GraphStats)
    _running: torch.Tensor = field(init=False)  # the rows of the step, padded
    _forwards: dict[int, Captured[Forward]] = field(default_factory=dict)
    _heads: dict[int, Captured[torch.Tensor]] = field(default_factory=dict)
    _pool: Any = None
    _stream: torch.cuda.Stream = field(init=False)  # one for all: the math library keeps a workspace per stream

    def __post_init__(self) -> None:
        self._running = torch.full((self.sizes[-1],), self.rows.padding, dtype=torch.int64, device=self.device)
        self._stream = torch.cuda.Stream(self.device)

    def size_for(self, plan: StepPlan) -> int | None:
        """The captured size that holds this step, if it is one of single tokens."""
        count = len(plan.rows)
        if plan.num_decodes < count or count > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, count)]

    def padded_rows(self, plan: StepPlan, size: int) -> np.ndarray:
        return np.pad(plan.rows, (0, size - len(plan.rows)), constant_values=self.rows.padding)

    def forward(self, padded_rows: torch.Tensor) -> Forward:
        size = len(padded_rows)
        if size not in self._forwards:
            self._forwards[size] = self._capture(lambda: self._forward(size), size)
        self._running[:size] = padded_rows
        self._forwards[size].graph.replay()
        self.stats.replays += 1
        return self._forwards[size].outputs

    def head(self, size: int) -> torch.Tensor:
        """Tokens [size] of the forward replayed last; those of padding rows mean nothing."""
        if size not in self._heads:
            step = self._forwards[size].outputs
            self._heads[size] = self._capture(lambda: self._head(step), size)
        self._heads[size].graph.replay()
        return self._heads[size].outputs

    def _forward(self, size: int) -> Forward:
        rows = self._running[:size]
        state = self.rows
        ids, positions, slots, lengths = decode_inputs(
            rows, state.padding, state.num_computed, state.next_token, state.tables, state.block_size
        )
        batch = AttentionBatch(
            slots=slots,
            query_start=torch.arange(size + 1, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            tables=state.tables,
            rows=rows,
            num_decodes=size,
            query_lens=np.ones(size, np.int32),
            seq_bounds=np.zeros(size, np.int32),  # a graph serves every length: nothing may be sized by these
            block_size=state.block_size,
        )
        if state.other_tables:
            batch.others = state.batches_of_others(batch, rows, positions)
        return Forward(StepInputs(ids, positions, batch), self.model.forward(ids, positions, batch))

    def _head(self, step: Forward) -> torch.Tensor:
        batch = step.inputs.batch
        return self.sampler.sample(self.model.logits(step.hidden), batch.rows, batch.seq_lens, ONLY_DRAW)

    def _capture(self, run: Callable[[], T], size: int) -> Captured[T]:
        """Run once, so that kernels are compiled, then record. Padding rows only, so that no request is touched."""
        running = self._running[:size].clone()
        self._running[:size] = self.rows.padding
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = run()
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._running[:size] = running
        self.stats.captures += 1
        return Captured(graph, outputs)


def graph_sizes(max_rows: int) -> list[int]:
    """Close together where padding costs most of a step: a decode's time grows slowly with its rows."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows] if max_rows <= 1024 else sizes
