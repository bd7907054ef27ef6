"""The running requests' numbers as arrays, one line per row, so that a step costs no Python per request.

A request holds one row from admission to finish or preemption. `epoch` tells a row's tenants apart: results of
a step that was planned for an earlier tenant are recognised by it and dropped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.request import Request
from kvasir.messages import FinishReason, Int32Array

RowNumbers = NDArray[np.int64]
NO_TOKEN = -1


class Rows:
    def __init__(self, max_rows: int, max_model_len: int) -> None:
        def ints() -> Int32Array:
            return np.zeros(max_rows, np.int32)

        def bools() -> NDArray[np.bool_]:
            return np.zeros(max_rows, np.bool_)

        self.num_computed = ints()  # tokens whose KV is computed or planned (upper bound)
        self.num_tokens = ints()  # tokens that exist, those still on the device included (upper bound)
        self.num_known = ints()  # tokens the host has seen
        self.fed_from = ints()  # from this position on, input tokens are taken from the device
        self.limit = ints()
        self.epoch = ints()
        self.account = ints()  # whose tokens they are, and up to which they were counted: see engine/queue.py
        self.num_counted = ints()
        self.stream = bools()
        self.logprobs = bools()
        self.needs_last_token = bools()
        self.picked = bools()
        self.any_picked = False  # whether there ever was such a row
        self.key = np.zeros(max_rows, np.int64)
        self.stop_ids: Int32Array = np.full((max_rows, 1), NO_TOKEN, np.int32)
        # calloc: pages that no request has touched take no memory
        self.tokens: Int32Array = np.zeros((max_rows, max_model_len), np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.order: NDArray[np.int64] = np.zeros(0, np.int64)  # rows in use, first admitted first
        self.version = 0  # changes with `order`
        self._free = list(range(max_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, num_computed: int) -> int:
        """Give the request a row and write its numbers there. The caller adds it to `order`."""
        row = self._free.pop()
        request.row = row
        known = len(request.token_ids)
        self.requests[row] = request
        self.tokens[row, :known] = request.token_ids
        self.num_computed[row] = num_computed
        self.num_tokens[row] = self.num_known[row] = self.fed_from[row] = known
        self.limit[row] = request.limit
        self.stream[row] = request.spec.stream
        self.logprobs[row] = request.spec.sampling.logprobs is not None
        self.needs_last_token[row] = request.spec.needs_last_token or request.spec.picked
        self.picked[row] = request.spec.picked
        self.any_picked |= request.spec.picked
        self.key[row] = request.key
        self._set_stop_ids(row, request.spec.sampling.stop_token_ids)
        return row

    def append(self, rows: list[int]) -> None:
        self.version += 1
        self.order = np.concatenate([self.order, np.array(rows, np.int64)])

    def leave(self, rows: list[int]) -> None:
        """The rows are free again; what they still have in flight will be dropped."""
        for row in rows:
            request = self.requests[row]
            assert request is not None, f"row {row} is free already"
            request.row = None
            self.requests[row] = None
            self._free.append(row)
        self.epoch[rows] += 1
        self.version += 1
        self.order = self.order[~np.isin(self.order, rows)]

    def known_tokens(self, row: int) -> Int32Array:
        return self.tokens[row, : self.num_known[row]]

    # ------------------------------------------------------------ of several rows at once

    def fed_by_host(self, rows: RowNumbers) -> RowNumbers:
        """Which of these rows are given tokens that the host knows: prompts, and what is picked from outside."""
        return np.flatnonzero(self.num_computed[rows] < self.fed_from[rows])

    def input_tokens(self, rows: RowNumbers, grants: Int32Array, fed: RowNumbers) -> Int32Array:
        """Input ids of a step; those that only the device knows are NO_TOKEN."""
        token_ids = np.full(int(grants.sum()), NO_TOKEN, np.int32)
        if len(fed):
            start = self.num_computed[rows]
            offsets = np.cumsum(grants) - grants
            for i in fed.tolist():
                row, first, count, at = int(rows[i]), int(start[i]), int(grants[i]), int(offsets[i])
                token_ids[at : at + count] = self.tokens[row, first : first + count]
        return token_ids

    def extend(self, rows: RowNumbers, tokens: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Write new tokens. Returns finish reasons (0: goes on) and how many tokens of each line count."""
        reasons: Int32Array = np.zeros(len(rows), np.int32)
        kept: Int32Array = np.zeros(len(rows), np.int32)
        for column in range(tokens.shape[1]):  # one column unless tokens were speculated
            goes_on = (reasons == FinishReason.NONE) & (counts > column)
            line = np.flatnonzero(goes_on)
            at, new = rows[line], tokens[line, column]
            known = self.num_known[at]
            self.tokens[at, known] = new
            self.num_known[at] = known + 1
            kept[line] += 1
            stopped = new == self.stop_ids[at, 0]
            for other in range(1, self.stop_ids.shape[1]):
                stopped |= new == self.stop_ids[at, other]
            full = known + 1 >= self.limit[at]
            reasons[line] = np.where(stopped, FinishReason.STOP, np.where(full, FinishReason.LENGTH, 0))
        return reasons, kept

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            missing = len(stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
