"""Steps as CUDA graphs: two replays instead of some hundred launches.

A step is padded to the next size there is a graph for. The forward graph reads which rows run, and how many tokens of
each, from fixed buffers and everything else from the rows on the device; the head graph turns its hidden states into
tokens, and scores them where asked. Steps in which every row runs one token have graphs of their own, which know more.
Graphs are captured when first needed (some 20 ms) and share one memory pool. Import this where there is a GPU: it
brings Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.attention.base import AttentionBatch
from kvasir.kernels.shared_prefixes import SharedPrefixes
from kvasir.kernels.triton.cache_update import decode_inputs
from kvasir.log import get_logger
from kvasir.messages import MAX_PREFIX_GROUPS, GraphUse, Int32Array, StepPlan, max_prefix_groups
from kvasir.models.transformer import Transformer
from kvasir.sampling.sampler import Sampler
from kvasir.sampling.stages import SampledRows, Stage
from kvasir.sampling.state import NO_LINES, Needs
from kvasir.worker.graph_pool import Captured, GraphPool
from kvasir.worker.graph_shapes import (
    BOUNDS,
    FIRST_STEPS,
    LIKELIEST,
    MIXED_SIZES,
    HeadShape,
    Shape,
    fitting_shape,
    longest_first,
    padded,
)
from kvasir.worker.mixed_inputs import mixed_inputs
from kvasir.worker.model import Model
from kvasir.worker.out_of_memory import is_out_of_memory
from kvasir.worker.rows import DeviceRows, StepInputs
from kvasir.worker.shared_prefixes import lay_out

logger = get_logger(__name__)
T = TypeVar("T")
S = TypeVar("S", "Shape", "HeadShape")
MOST_GRAPHS = 512  # forwards and heads; each takes some megabytes, and a load that changes brings ever new shapes
PUT_OFF = 1000  # steps of a shape that run without a graph after there was no memory to capture one


@dataclass(slots=True)
class Forward:
    inputs: StepInputs
    hidden: torch.Tensor


@dataclass(slots=True)
class GraphStats:
    replays: int = 0
    mixed_steps: int = 0
    filtered_heads: int = 0
    banning_heads: int = 0
    staged_heads: int = 0
    scored_heads: int = 0
    stale_heads: int = 0  # dropped because a table that they read was replaced
    shared_prefix_steps: int = 0
    ordered_steps: int = 0


@dataclass(slots=True)
class StepGraphs:
    model: Model
    rows: DeviceRows
    sampler: Sampler
    sizes: list[int]  # of steps in which every row runs one token
    device: torch.device
    num_ranks: int = 1  # others capture the same, and would wait for one that does not
    stats: GraphStats = field(default_factory=GraphStats)
    use: GraphUse = field(default_factory=GraphUse)  # as of the last capture, or the last that failed
    pool: GraphPool = field(init=False)
    _running: torch.Tensor = field(init=False)  # the rows of the step, padded
    _num_tokens: torch.Tensor = field(init=False)  # of each; read by mixed steps
    _token_ids: torch.Tensor = field(init=False)  # of all; read by mixed steps
    _order: torch.Tensor = field(init=False)  # of the step's rows, the longest first; read by steps of single tokens
    _shared: SharedPrefixes = field(init=False)  # read by steps in which rows share
    _lines: torch.Tensor = field(init=False)  # those of the step that sample, padded with -1; read by mixed steps
    _scored: torch.Tensor = field(init=False)  # those of the head that get log-probabilities, padded with 0
    _forwards: dict[Shape, Captured[Forward]] = field(default_factory=dict)
    _heads: dict[HeadShape, Captured[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    _short: Model | None = field(init=False)  # launches what the model does; None where nothing is compiled
    _put_off: dict[Shape | HeadShape, int] = field(default_factory=dict)  # how many steps are still to run without one

    def __post_init__(self) -> None:
        most = max(self.sizes[-1], MIXED_SIZES[-1])
        self.pool = GraphPool(self.device)
        self._running = torch.full((most,), self.rows.padding, dtype=torch.int64, device=self.device)
        buffers = torch.zeros(4, most, dtype=torch.int32, device=self.device)
        self._num_tokens, self._token_ids, self._lines, self._scored = buffers
        self._order = torch.arange(most, dtype=torch.int32, device=self.device)
        tokens, members = torch.zeros(2, most, dtype=torch.int32, device=self.device)
        starts = torch.zeros(MAX_PREFIX_GROUPS + 1, dtype=torch.int32, device=self.device)
        self._shared = SharedPrefixes(tokens, members, starts)
        self._short = None
        if kernels.are_compiled(self.device) and isinstance(self.model, Transformer):
            self._short = self.model.compile_copy()

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The graph that this step runs as, captured now if it is the first: nothing of the step has happened yet, so
        that it can run without one, if there is no memory. None: without one."""
        shape = fitting_shape(plan, self.sizes)
        return shape if shape is None or shape in self._forwards or self._add_forward(shape) else None

    def told(self, plan: StepPlan, shape: Shape) -> tuple[Int32Array, ...]:
        """What the device must be told of a step: its rows, and unless it knows them, tokens of each and their ids;
        which rows come first, if that matters; and what they share."""
        rows, shared = padded(plan.rows, shape.rows, self.rows.padding), lay_out(plan.shared, shape.rows)
        if shape.is_mixed:
            num_tokens, token_ids = padded(plan.num_tokens, shape.rows, 0), padded(plan.token_ids, shape.tokens, 0)
            return rows, num_tokens, token_ids, NO_LINES, *shared
        known = not bool((plan.token_ids >= 0).any())
        token_ids = NO_LINES if known else padded(plan.token_ids, shape.rows, -1)
        order = longest_first(plan.bounds, shape.rows) if shape.is_ordered else NO_LINES
        return rows, NO_LINES, token_ids, order, *shared

    def forward(
        self,
        shape: Shape,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        token_ids: torch.Tensor,
        order: torch.Tensor,
        shared: SharedPrefixes,
    ) -> Forward:
        """Replay a step; the tensors are what `told` made, on the device."""
        self._running[: shape.rows] = rows
        if shape.is_mixed:
            self._num_tokens[: shape.rows] = num_tokens
            self._token_ids[: shape.tokens] = token_ids
        elif len(token_ids):
            own, next_token = rows.long(), self.rows.next_token
            next_token[own] = torch.where(token_ids >= 0, token_ids, next_token[own])
        if shape.is_ordered:
            self._order[: shape.rows] = order
        if shape.shares:
            self._shared.tokens[: shape.rows] = shared.tokens
            self._shared.members[: shape.rows] = shared.members
            self._shared.starts[: len(shared.starts)] = shared.starts
        captured = self._forwards[shape]
        captured.graph.replay()
        self.stats.replays += 1
        captured.last_use = self.stats.replays
        self.stats.mixed_steps += shape.is_mixed
        self.stats.shared_prefix_steps += shape.shares
        self.stats.ordered_steps += shape.is_ordered
        return captured.outputs

    def head_for(self, shape: Shape, num_lines: int, needs: Needs) -> HeadShape | None:
        """The head graph for so many of a step's lines, captured now if it is the first. None: they ask for what no
        graph can do, or there is no memory for one."""
        if num_lines > self.sizes[-1] or not all(stage.capturable for stage in needs.stages):
            return None
        if needs.num_logprobs > LIKELIEST[-1]:
            return None
        rows = self.sizes[bisect_left(self.sizes, num_lines)] if shape.is_mixed else shape.rows
        head = HeadShape(shape, rows, needs.filters, needs.bans)
        if needs.stages:
            head = replace(head, stages=self._stages())
        if len(needs.logprob_lines):
            scored = min(rows, 1 << (len(needs.logprob_lines) - 1).bit_length())
            likeliest = LIKELIEST[bisect_left(LIKELIEST, needs.num_logprobs)]
            head = replace(head, scored=scored, likeliest=likeliest, named=needs.named)
        head = replace(head, versions=self._versions(head))
        return head if head in self._heads or self._add_head(head) else None

    def _stages(self) -> tuple[Stage, ...]:
        return self.sampler.state.stages.in_graphs()

    def _versions(self, head: HeadShape) -> tuple[int, ...]:
        """Of the tables that such a head would read now."""
        versions = [stage.version for stage in head.stages]
        versions += [self.sampler.state.version] if head.bans else []
        versions += [self.sampler.scores.named.version] if head.named else []
        return tuple(versions)

    def told_head(
        self, head: HeadShape, plan: StepPlan, lines: NDArray[np.int32], needs: Needs
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """What the device must be told of a head: where the last tokens of the lines that sample are, in a mixed step;
        which rows sample, in others, unless all do or it makes no difference; and which lines are scored."""
        chosen = rows = scored = NO_LINES
        if head.forward.is_mixed:
            chosen = padded(lines, head.rows, -1)
        elif head.stages and len(lines) < len(plan.rows):  # the others draw too, and stages must not learn that
            rows = padded(np.where(plan.samples, plan.rows, self.rows.padding), head.rows, self.rows.padding)
        if head.scored:
            own = needs.logprob_lines
            scored = padded(own if head.forward.is_mixed else lines[own], head.scored, 0)
        return chosen, rows, scored

    def head(self, shape: HeadShape, *told: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tokens of the forward replayed last, [rows], and if some lines are scored the ids, values and ranks of these;
        what is of padding means nothing. `told`: what `told_head` made, on the device; nothing if all of it is empty.
        """
        for buffer, part in zip((self._lines, self._running, self._scored), told, strict=False):
            if len(part):
                buffer[: len(part)] = part
        self._heads[shape].graph.replay()
        self.stats.filtered_heads += shape.filters
        self.stats.banning_heads += shape.bans
        self.stats.staged_heads += bool(shape.stages)
        self.stats.scored_heads += bool(shape.scored)
        return self._heads[shape].outputs

    @torch.inference_mode()
    def rehearse(self, largest: StepPlan) -> None:
        """Launch what a lone request's first steps do, and the largest step if it fits a graph, without capturing them
        (see kernels.rehearsal)."""
        model = self.model if self._short is None else self._short
        heads = [HeadShape(shape, rows=1, filters=False) for shape in FIRST_STEPS]
        if (shape := fitting_shape(largest, self.sizes)) is not None:
            heads.append(HeadShape(shape, rows=len(largest.rows), filters=False))
        for head in heads:
            self._clear_inputs(head.forward)
            self._head(self._forward(head.forward, model), head)

    # ------------------------------------------------------------ what is captured

    def _add_forward(self, shape: Shape) -> bool:
        """Whether there is one now."""
        if self._is_put_off(shape):
            return False
        self._make_way(shape)
        self._clear_inputs(shape)
        run, compile = (lambda: self._forward(shape, self.model)), (lambda: self._compile_forward(shape))
        return self._capture(self._forwards, shape, run, compile)

    def _add_head(self, shape: HeadShape) -> bool:
        """Likewise. It is run to be captured, and again for this step: stages must learn what is drawn once. So all
        its rows are padding until it is there."""
        if self._is_put_off(shape):
            return False
        self._drop_stale_heads()
        self._make_way(shape.forward)
        self._lines[: shape.rows] = -1
        self._scored[: shape.scored] = 0  # those of another step may lie past the end of this one's
        step = self._forwards[shape.forward].outputs
        running = self._running[: shape.forward.rows]
        real = running.clone()
        running.fill_(self.rows.padding)
        try:
            return self._capture(self._heads, shape, lambda: self._head(step, shape), lambda: self._compile_head(shape))
        finally:
            running.copy_(real)  # this step still samples, with the graph or without one

    def _drop_stale_heads(self) -> None:
        """Those that would read tables that are no more, or lack a stage that was never asked for before."""
        stale = [
            head
            for head in self._heads
            if head.versions != self._versions(head) or (head.stages and head.stages != self._stages())
        ]
        if stale:
            self.stats.stale_heads += self._drop(stale)
            self._count()

    def _make_way(self, current: Shape) -> None:
        """If there are as many graphs as there may be, drop a forward and its heads, those not used for longest; all
        heads, if there is no other forward. It depends on the steps alone, so that all ranks drop the same."""
        if len(self._forwards) + len(self._heads) < MOST_GRAPHS:
            return
        others = [shape for shape in self._forwards if shape != current]
        oldest = min(others, key=lambda shape: self._forwards[shape].last_use, default=None)
        heads = [head for head in self._heads if oldest is None or head.forward == oldest]
        self._count(dropped=self._drop(heads, [] if oldest is None else [oldest]))

    def _drop(self, heads: list[HeadShape], forwards: Sequence[Shape] = ()) -> int:
        """How many those were."""
        dropped: list[Captured[Any]] = [self._heads.pop(head) for head in heads]
        dropped += [self._forwards.pop(shape) for shape in forwards]
        number = len(dropped)
        self.pool.drop(dropped)
        return number

    def _compile_forward(self, shape: Shape) -> None:
        """All at once what this shape is the first to need."""
        if self._short is not None:
            with kernels.rehearsal():
                self._forward(shape, self._short)

    def _compile_head(self, shape: HeadShape) -> None:
        """The same for stages, whose kernels few steps need."""
        if self._short is not None and shape.stages:
            with kernels.rehearsal():
                self._head(self._forwards[shape.forward].outputs, shape)

    def _clear_inputs(self, shape: Shape) -> None:
        """Padding rows only, so that no request is touched; order and groups of a larger step would name rows past the
        end."""
        self._running[: shape.rows] = self.rows.padding
        self._num_tokens[: shape.rows] = 0
        self._order[: shape.rows] = torch.arange(shape.rows, device=self.device)
        self._shared.tokens.zero_()
        self._shared.starts.zero_()

    def _capture(
        self, graphs: dict[S, Captured[T]], shape: S, run: Callable[[], T], prepare: Callable[[], None] = lambda: None
    ) -> bool:
        """False: there is no memory. A graph keeps what it takes, so that without one the same step may fit."""
        try:
            prepare()
            graphs[shape] = self.pool.capture(run)
            self._count()
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.num_ranks > 1:
                raise
            reason = str(error).partition("\n")[0]
        self._put_off[shape] = PUT_OFF
        self._count(put_off=1)
        self.pool.release()  # after the error, whose traceback holds tensors, is gone
        logger.warning(
            "no memory for a CUDA graph of %s: %s. The next %d such steps are launched kernel by kernel, which takes "
            "longer. To avoid this, lower gpu_memory_utilization or kv_cache_memory_bytes.",
            shape, reason, PUT_OFF,
        )  # fmt: skip
        return False

    def _count(self, put_off: int = 0, dropped: int = 0) -> None:
        count, size = len(self._forwards) + len(self._heads), self.num_ranks * self.pool.memory.taken  # ranks are alike
        self.use = GraphUse(count, size, self.use.graphs_deferred + put_off, self.use.graphs_dropped + dropped)

    def _is_put_off(self, shape: Shape | HeadShape) -> bool:
        left = self._put_off.get(shape, 0)
        if left:
            self._put_off[shape] = left - 1
        return left > 0

    def _forward(self, shape: Shape, model: Model) -> Forward:
        rows = self._running[: shape.rows]
        if shape.is_mixed:
            counts, ids = self._num_tokens[: shape.rows], self._token_ids[: shape.tokens]
            inputs = mixed_inputs(self.rows, rows, counts, ids, BOUNDS[-1], shape.bound, self._shared_of(shape))
        else:
            inputs = self._decode_inputs(shape, rows)
        return Forward(inputs, model.forward(inputs.input_ids, inputs.positions, inputs.batch))

    def _decode_inputs(self, shape: Shape, rows: torch.Tensor) -> StepInputs:
        state = self.rows
        ids, positions, slots, lengths = decode_inputs(
            rows, state.padding, state.num_computed, state.next_token, state.tables, state.block_size
        )
        batch = AttentionBatch(
            slots=slots,
            query_start=torch.arange(shape.rows + 1, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            tables=state.tables,
            rows=rows,
            num_decodes=shape.rows,
            query_lens=np.ones(shape.rows, np.int32),
            seq_bounds=np.full(shape.rows, BOUNDS[-1], np.int32),
            block_size=state.block_size,
            shared=self._shared_of(shape),
            own_bound=shape.bound,
            order=self._order[: shape.rows] if shape.is_ordered else None,
        )
        if state.other_tables:
            batch.others = state.batches_of_others(batch, rows, positions)
        return StepInputs(ids, positions, batch)

    def _shared_of(self, shape: Shape) -> SharedPrefixes | None:
        if not shape.shares:
            return None
        shared = self._shared
        starts = shared.starts[: max_prefix_groups(shape.rows) + 1]
        return SharedPrefixes(shared.tokens[: shape.rows], shared.members[: shape.rows], starts)

    def _head(self, step: Forward, shape: HeadShape) -> tuple[torch.Tensor, ...]:
        batch, hidden = step.inputs.batch, step.hidden
        rows, lengths = batch.rows, batch.seq_lens
        if shape.forward.is_mixed:
            lines = self._lines[: shape.rows].long()
            own = lines.clamp(min=0)
            rows, lengths = torch.where(lines < 0, self.rows.padding, rows[own]), lengths[own]
            hidden = hidden[(batch.query_start[1:][own] - 1).clamp(min=0)]
        scored = self._scored[: shape.scored] if shape.scored else None
        step_rows = SampledRows(NO_LINES, rows, lengths)
        return self.sampler.sample(self.model.logits(hidden), step_rows, shape.needs, scored)
