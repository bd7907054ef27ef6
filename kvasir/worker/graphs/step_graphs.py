"""Steps as CUDA graphs: two replays instead of some hundred launches.

A step is padded to the next size that has a graph. The forward graph reads which rows run, and how many tokens of each,
from fixed buffers and everything else from the rows on the device; the head graph turns its hidden states into tokens,
and runs the features that rows ask for. Steps in which every row runs one token have graphs of their own, which do
less. Graphs are captured when first needed (some 20 ms). Worker process; imports Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvasir import kernels
from kvasir.kernels.upload import upload
from kvasir.messages import GraphUse, Int32Array, StepPlan
from kvasir.sampling.features import (
    NO_LINES,
    FeatureUse,
    HeadLayout,
    HeadWork,
    RowFeature,
    SampledLines,
    SampledRows,
    Uses,
)
from kvasir.sampling.sampler import Sampler
from kvasir.worker.graphs.buffers import NO_LINE, GraphBuffers
from kvasir.worker.graphs.cache import ForwardOutputs, GraphCache, HeadOutputs
from kvasir.worker.graphs.keys import FIRST_STEPS, MIXED_SIZES, ForwardGraphKey, HeadGraphKey, fitting_key
from kvasir.worker.graphs.pool import GraphPool
from kvasir.worker.model import Model
from kvasir.worker.step_inputs import DeviceRows, HostInputs, padded


@dataclass(slots=True)
class GraphStats:
    replays: int = 0
    mixed_steps: int = 0
    stale_heads: int = 0  # dropped because a table that they read was replaced
    shared_prefix_steps: int = 0
    ordered_steps: int = 0
    heads: Counter[str] = field(default_factory=Counter)  # replays of heads by what their features do


class StepGraphs:
    def __init__(
        self,
        model: Model,
        state: DeviceRows,
        sampler: Sampler,
        sizes: list[int],  # of steps in which every row runs one token
        device: torch.device,
        num_ranks: int = 1,
    ) -> None:
        self.model, self.sampler, self.sizes, self.device = model, sampler, sizes, device
        self.stats = GraphStats()
        self.buffers = GraphBuffers(state, max(sizes[-1], MIXED_SIZES[-1]), device)
        self.cache = GraphCache(GraphPool(device), num_ranks)
        self._padding_row = state.padding
        # Launches every kernel variant of the model; None where kernels are not compiled.
        self._compile_copy = model.compile_copy() if kernels.are_compiled(device) else None

    @property
    def use(self) -> GraphUse:
        return self.cache.use

    # ------------------------------------------------------------ forward passes

    def forward_key(self, plan: StepPlan) -> ForwardGraphKey | None:
        """The graph that this step runs as, captured now if it is the first. None: the step runs without a graph;
        nothing of it has happened yet, so it can do that if there is no memory for one."""
        key = fitting_key(plan, self.sizes)
        return key if key is None or key in self.cache.forwards or self._add_forward(key) else None

    def forward(self, key: ForwardGraphKey, inputs: HostInputs[torch.Tensor]) -> ForwardOutputs:
        """Replay a step with these inputs."""
        self.buffers.write(key, inputs)
        captured, stats = self.cache.forwards[key], self.stats
        captured.graph.replay()
        stats.replays += 1
        captured.last_use = stats.replays
        stats.mixed_steps += key.is_mixed
        stats.shared_prefix_steps += key.shares
        stats.ordered_steps += key.is_ordered
        return captured.outputs

    def _add_forward(self, key: ForwardGraphKey) -> bool:
        """Whether there is one now."""
        cache = self.cache
        if cache.is_deferred(key):
            return False
        cache.make_room(key)
        self.buffers.clear(key)
        run, compile = (lambda: self._forward(key, self.model)), (lambda: self._compile_forward(key))
        return cache.capture(cache.forwards, key, run, compile)

    def _forward(self, key: ForwardGraphKey, model: Model) -> ForwardOutputs:
        inputs = self.buffers.step_inputs(key)
        return ForwardOutputs(inputs, model.forward(inputs.input_ids, inputs.positions, inputs.batch))

    # ------------------------------------------------------------ heads

    def head_key(
        self, forward: ForwardGraphKey, num_lines: int, uses: list[tuple[RowFeature, FeatureUse]]
    ) -> HeadGraphKey | None:
        """The head graph for this many lines, captured now if it is the first. None: the rows ask for something that no
        graph can do, or there is no memory for one."""
        if num_lines > self.sizes[-1] or not all(use.capturable for _, use in uses):
            return None
        rows = self.sizes[bisect_left(self.sizes, num_lines)] if forward.is_mixed else forward.rows
        chosen: Uses = tuple((feature, feature.graph_key(use.key, rows)) for feature, use in uses)
        head = HeadGraphKey(forward, rows, chosen, versions_of(chosen))
        return head if head in self.cache.heads or self._add_head(head) else None

    def head(self, key: HeadGraphKey, sampled: SampledLines, uses: list[tuple[RowFeature, FeatureUse]]) -> HeadOutputs:
        """Tokens [rows] of the forward replayed last, and the features' outputs; those of padding mean nothing."""
        arrays, buffers = self._head_inputs(key, sampled, uses)
        if any(map(len, arrays)):
            for buffer, part in zip(buffers, upload(arrays, self.device), strict=True):
                if len(part):
                    buffer[: len(part)] = part
        captured = self.cache.heads[key]
        captured.graph.replay()
        for feature, own in key.uses:
            for label in feature.labels(own):
                self.stats.heads[label] += 1
        return captured.outputs

    def _head_inputs(
        self, key: HeadGraphKey, sampled: SampledLines, uses: list[tuple[RowFeature, FeatureUse]]
    ) -> tuple[list[Int32Array], list[torch.Tensor]]:
        """What the host sends for a head, and where each array goes."""
        plan, lines = sampled.plan, sampled.lines
        chosen = rows = NO_LINES
        if key.forward.is_mixed:
            chosen = padded(lines, key.rows, NO_LINE)
        elif len(lines) < len(plan.rows) and any(use.observes for _, use in uses):
            # All rows draw here. Features must not count what rows draw that do not sample.
            rows = padded(np.where(plan.samples, plan.rows, self._padding_row), key.rows, self._padding_row)
        arrays, buffers = [chosen, rows], [self.buffers.lines, self.buffers.rows]
        layout = HeadLayout(key.rows, None if key.forward.is_mixed else lines)
        for (feature, own), (_, use) in zip(key.uses, uses, strict=True):
            arrays += use.inputs(own, layout)
            buffers += feature.buffers(own, key.rows)
        return arrays, buffers

    def _add_head(self, key: HeadGraphKey) -> bool:
        """Whether there is one now. A head is run to be captured, and again for this step, but features must observe
        each token once. So all its rows are padding until it is captured."""
        cache = self.cache
        if cache.is_deferred(key):
            return False
        self.stats.stale_heads += cache.drop_heads(is_stale)
        cache.make_room(key.forward)
        self.buffers.lines[: key.rows] = NO_LINE
        for feature, own in key.uses:
            feature.clear(own, key.rows)
        step = cache.forwards[key.forward].outputs
        running = self.buffers.rows[: key.forward.rows]
        real = running.clone()
        running.fill_(self._padding_row)
        try:
            return cache.capture(cache.heads, key, lambda: self._head(step, key), lambda: self._compile_head(key))
        finally:
            running.copy_(real)  # this step still samples, with the graph or without one

    def _head(self, step: ForwardOutputs, key: HeadGraphKey) -> HeadOutputs:
        batch, hidden = step.inputs.batch, step.hidden
        rows, lengths = batch.rows, batch.seq_lens
        if key.forward.is_mixed:
            lines = self.buffers.lines[: key.rows].long()
            own = lines.clamp(min=0)
            rows, lengths = torch.where(lines < 0, self._padding_row, rows[own]), lengths[own]
            hidden = hidden[(batch.query_start[1:][own] - 1).clamp(min=0)]
        work = [HeadWork(feature, use, feature.buffers(use, key.rows)) for feature, use in key.uses]
        return self.sampler.sample(self.model.logits(hidden), SampledRows(NO_LINES, rows, lengths), work)

    # ------------------------------------------------------------ compiling

    @torch.inference_mode()
    def precompile(self, largest: StepPlan) -> None:
        """Launch the kernels of a single request's first steps, and of the largest step if it fits a graph, without
        capturing anything (see kernels.precompile)."""
        model = self.model if self._compile_copy is None else self._compile_copy
        heads = [HeadGraphKey(key, rows=1) for key in FIRST_STEPS]
        if (key := fitting_key(largest, self.sizes)) is not None:
            heads.append(HeadGraphKey(key, rows=len(largest.rows)))
        for head in heads:
            self.buffers.clear(head.forward)
            self._head(self._forward(head.forward, model), head)

    def _compile_forward(self, key: ForwardGraphKey) -> None:
        """Compile, all at once, the kernel variants that this graph is the first to need."""
        if self._compile_copy is not None:
            with kernels.precompile():
                self._forward(key, self._compile_copy)

    def _compile_head(self, key: HeadGraphKey) -> None:
        """The same for the kernels of features, which few steps need."""
        if self._compile_copy is not None and key.uses:
            with kernels.precompile():
                self._head(self.cache.forwards[key.forward].outputs, key)


def versions_of(uses: Iterable[tuple[RowFeature, object]]) -> tuple[int, ...]:
    """Versions of the tables that these features read now."""
    return tuple(version for feature, key in uses for version in feature.versions(key))


def is_stale(head: HeadGraphKey) -> bool:
    """Whether a head reads tables that were replaced, or lacks a stage that was asked for since."""
    return head.versions != versions_of(head.uses) or any(
        feature.graph_key(key, head.rows) != key for feature, key in head.uses
    )
