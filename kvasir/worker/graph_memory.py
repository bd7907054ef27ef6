"""The memory of graphs: one pool into which all are captured, and the fixed buffers that all share. Worker process.

The pool measures what the graphs take. From some buffers a graph reads what differs from step to step, in others a
forward graph leaves what a head graph continues with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from kvasir.kernels.layout import SharedPrefixes
from kvasir.messages import MAX_PREFIX_GROUPS, max_prefix_groups
from kvasir.worker.step_inputs import (
    NO_LINE,
    DeviceRows,
    HostInputs,
    StepInputs,
    decode_graph_inputs,
    encoder_graph_inputs,
    mixed_graph_inputs,
)

if TYPE_CHECKING:
    from kvasir.worker.graph_keys import ForwardGraphKey

T = TypeVar("T")
MIB = 1 << 20
SEGMENT = 64 * MIB  # torch takes memory in segments, of which a graph may use a part


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept_free = 0  # bytes for the largest step, which is launched kernel by kernel
        self.taken = 0  # bytes by all graphs, measured
        self._pool: Any = None

    def capture(self, run: Callable[[], T]) -> Captured[T]:
        """Record what `run` launches. Its kernels must be compiled, and only the first graph is run beforehand: it is
        the largest, and the math library takes its workspace then."""
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                if self._pool is None:
                    run()
                    self._pool = torch.cuda.graph_pool_handle()
                    torch.cuda.empty_cache()  # a pool of graphs gets nothing of what torch keeps for other steps
                return self._record(run)
        finally:
            here.wait_stream(stream)

    def _record(self, run: Callable[[], T]) -> Captured[T]:
        before = self._check_memory()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken; if it stayed open, every later one would fail
                graph.capture_end()
            raise
        graph.capture_end()
        self.taken += max(0, before - torch.cuda.mem_get_info(self.device)[0])
        return Captured(graph, outputs)

    def _check_memory(self) -> int:
        """The bytes that are free; raises OutOfMemoryError if they are needed for other steps."""
        free = int(torch.cuda.mem_get_info(self.device)[0])
        if free < self.kept_free + SEGMENT:
            raise torch.OutOfMemoryError(
                f"{free // MIB} MiB are free, of which {self.kept_free // MIB} are kept for the largest step"
            )
        return free


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the whole process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)


class GraphBuffers:
    def __init__(self, state: DeviceRows, size: int, device: torch.device) -> None:
        self.state = state
        self.device = device
        # of mixed steps: their rows, tokens of each row, ids of the tokens, and lines that sample
        self.mixed_rows = torch.full((size,), state.padding, dtype=torch.int64, device=device)
        self.num_tokens, self.token_ids, self.lines = torch.zeros(3, size, dtype=torch.int32, device=device)
        self.order = torch.arange(size, dtype=torch.int32, device=device)  # the longest rows first, in ordered steps
        tokens, members = torch.zeros(2, size, dtype=torch.int32, device=device)
        starts = torch.zeros(MAX_PREFIX_GROUPS + 1, dtype=torch.int32, device=device)
        self.shared = SharedPrefixes(tokens, members, starts)
        # The lines that sample, for heads. In steps of single tokens all do, and `rows` are the step's.
        self.rows = torch.full((size,), state.padding, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(size, 0, device=device)  # [size, hidden], made when the width is known
        self.drafting = torch.full((size,), state.padding, dtype=torch.int64, device=device)  # rows of a drafter's pass
        # Which rows have these lines, where rows may have drafts: their numbers, first lines and numbers of lines.
        self.row_lines = torch.zeros(3, size, dtype=torch.int32, device=device)

    def write(self, key: ForwardGraphKey, inputs: HostInputs[torch.Tensor]) -> None:
        """Put the inputs of a step where its graph reads them."""
        if key.is_mixed:
            self.mixed_rows[: key.rows] = inputs.rows
            self.num_tokens[: key.rows] = inputs.num_tokens
            self.token_ids[: key.tokens] = inputs.token_ids
            self.lines[: key.lines] = inputs.lines
        else:
            self.rows[: key.rows] = inputs.rows
            if len(inputs.token_ids):
                own, next_token = inputs.rows.long(), self.state.next_token
                next_token[own] = torch.where(inputs.token_ids >= 0, inputs.token_ids, next_token[own])
        if key.is_ordered:
            self.order[: key.rows] = inputs.order
        if key.shares:
            self.shared.tokens[: key.rows] = inputs.prefix_tokens
            self.shared.members[: key.rows] = inputs.prefix_members
            self.shared.starts[: len(inputs.prefix_starts)] = inputs.prefix_starts

    def clear(self) -> None:
        """Leave padding rows only, so that a capture touches no request."""
        self.rows.fill_(self.state.padding)
        self.mixed_rows.fill_(self.state.padding)
        self.drafting.fill_(self.state.padding)
        self.num_tokens.zero_()
        self.lengths.zero_()
        self.lines.fill_(NO_LINE)
        self.row_lines[0] = self.state.padding
        self.row_lines[1] = 0
        self.row_lines[2] = 1
        torch.arange(len(self.order), out=self.order)
        self.shared.tokens.zero_()
        self.shared.starts.zero_()

    def step_inputs(self, key: ForwardGraphKey) -> StepInputs:
        """What the model gets; captured as part of the graph."""
        shared = self._shared(key)
        if key.is_mixed:
            rows, counts, ids = self.mixed_rows[: key.rows], self.num_tokens[: key.rows], self.token_ids[: key.tokens]
            return mixed_graph_inputs(self.state, rows, counts, ids, key.bound, shared)
        order = self.order[: key.rows] if key.is_ordered else None
        rows, lengths = self.rows[: key.rows], self.lengths[: key.rows]
        return decode_graph_inputs(self.state, rows, lengths, key.bound, shared, order)

    def leave(self, key: ForwardGraphKey, hidden: torch.Tensor, inputs: StepInputs) -> None:
        """Put what the head needs where it reads it; captured too. `hidden` has one line for each row, or where rows
        may have drafts, for each token."""
        if self.hidden.shape[1] != hidden.shape[1] or self.hidden.dtype != hidden.dtype:
            self.hidden = torch.zeros(len(self.rows), hidden.shape[1], dtype=hidden.dtype, device=self.device)
        kept = self.hidden[: key.lines if key.is_mixed else key.rows]
        if not key.is_mixed:
            kept.copy_(hidden)
            return
        lines = self.lines[: key.lines].long()
        own, batch = lines.clamp(min=0), inputs.batch
        torch.index_select(hidden, 0, own, out=kept)
        rows, lengths = batch.rows, batch.seq_lens
        if key.drafts:  # the lines are tokens
            assert inputs.rows is not None, "mixed steps know the row of each token"
            rows, lengths = inputs.rows, inputs.positions.to(torch.int32) + 1
        self.rows[: key.lines] = torch.where(lines < 0, self.state.padding, rows[own])
        self.lengths[: key.lines] = lengths[own]

    def _shared(self, key: ForwardGraphKey) -> SharedPrefixes | None:
        if not key.shares:
            return None
        shared, count = self.shared, max_prefix_groups(key.rows)
        return SharedPrefixes(shared.tokens[: key.rows], shared.members[: key.rows], shared.starts[: count + 1])


class EncoderBuffers:
    """The same for an encoder, whose graphs read whole prompts, and leave the hidden states of all tokens."""

    def __init__(self, state: DeviceRows, size: int, device: torch.device) -> None:
        self.state, self.size, self.device = state, size, device
        self.prompts = torch.zeros(3 * size + 1, dtype=torch.int32, device=device)  # see step_inputs.whole_prompts
        self.hidden = torch.zeros(size, 0, device=device)  # [size, hidden], made when the width is known

    def write(self, key: ForwardGraphKey, inputs: HostInputs[torch.Tensor]) -> None:
        """Put the inputs of a step where its graph reads them."""
        self.prompts[: len(inputs.prompts)] = inputs.prompts

    def clear(self) -> None:
        """Leave no prompt."""
        self.prompts.zero_()

    def step_inputs(self, key: ForwardGraphKey) -> StepInputs:
        """What the model gets; captured as part of the graph."""
        return encoder_graph_inputs(self.state, self.prompts, key)

    def leave(self, key: ForwardGraphKey, hidden: torch.Tensor, inputs: StepInputs) -> None:
        """Put the states where poolers read them; captured too."""
        if self.hidden.shape[1] != hidden.shape[1] or self.hidden.dtype != hidden.dtype:
            self.hidden = torch.zeros(self.size, hidden.shape[1], dtype=hidden.dtype, device=self.device)
        self.hidden[: key.tokens].copy_(hidden)
