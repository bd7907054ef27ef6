"""The fixed buffers from which graphs read what differs from step to step. All graphs share them. Worker process."""

from __future__ import annotations

import torch

from kvasir.kernels.layout import SharedPrefixes
from kvasir.messages import MAX_PREFIX_GROUPS, max_prefix_groups
from kvasir.worker.graphs.keys import ForwardGraphKey
from kvasir.worker.step_inputs import DeviceRows, HostInputs, StepInputs, decode_graph_inputs, mixed_graph_inputs

NO_LINE = -1


class GraphBuffers:
    def __init__(self, state: DeviceRows, size: int, device: torch.device) -> None:
        self.state = state
        self.device = device
        self.rows = torch.full((size,), state.padding, dtype=torch.int64, device=device)  # of the step
        # the next two are read by mixed steps: tokens of each row, and their ids
        self.num_tokens, self.token_ids = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.lines = torch.zeros(size, dtype=torch.int32, device=device)  # that sample, in a mixed step; or NO_LINE
        self.order = torch.arange(size, dtype=torch.int32, device=device)  # the longest rows first, in ordered steps
        tokens, members = torch.zeros(2, size, dtype=torch.int32, device=device)
        starts = torch.zeros(MAX_PREFIX_GROUPS + 1, dtype=torch.int32, device=device)
        self.shared = SharedPrefixes(tokens, members, starts)

    def write(self, key: ForwardGraphKey, inputs: HostInputs[torch.Tensor]) -> None:
        """Put the inputs of a step where its graph reads them."""
        self.rows[: key.rows] = inputs.rows
        if key.is_mixed:
            self.num_tokens[: key.rows] = inputs.num_tokens
            self.token_ids[: key.tokens] = inputs.token_ids
        elif len(inputs.token_ids):
            own, next_token = inputs.rows.long(), self.state.next_token
            next_token[own] = torch.where(inputs.token_ids >= 0, inputs.token_ids, next_token[own])
        if key.is_ordered:
            self.order[: key.rows] = inputs.order
        if key.shares:
            self.shared.tokens[: key.rows] = inputs.prefix_tokens
            self.shared.members[: key.rows] = inputs.prefix_members
            self.shared.starts[: len(inputs.prefix_starts)] = inputs.prefix_starts

    def clear(self, key: ForwardGraphKey) -> None:
        """Leave padding rows only, so that a capture touches no request. Order and groups of a larger step would point
        past the end of this one."""
        self.rows[: key.rows] = self.state.padding
        self.num_tokens[: key.rows] = 0
        self.order[: key.rows] = torch.arange(key.rows, device=self.device)
        self.shared.tokens.zero_()
        self.shared.starts.zero_()

    def step_inputs(self, key: ForwardGraphKey) -> StepInputs:
        """What the model gets; captured as part of the graph."""
        rows, shared = self.rows[: key.rows], self._shared(key)
        if key.is_mixed:
            counts, ids = self.num_tokens[: key.rows], self.token_ids[: key.tokens]
            return mixed_graph_inputs(self.state, rows, counts, ids, key.bound, shared)
        order = self.order[: key.rows] if key.is_ordered else None
        return decode_graph_inputs(self.state, rows, key.bound, shared, order)

    def _shared(self, key: ForwardGraphKey) -> SharedPrefixes | None:
        if not key.shares:
            return None
        shared, count = self.shared, max_prefix_groups(key.rows)
        return SharedPrefixes(shared.tokens[: key.rows], shared.members[: key.rows], shared.starts[: count + 1])
