"""The numbers of the running requests as arrays, one entry per row, so that a step costs no Python per request.

A request holds one row from admission until it finishes or is preempted. `epoch` changes whenever the results of steps
in flight stop being valid for a row: it has a new request, or the host has changed its tokens.

`num_computed` and `num_tokens` are upper bounds while results are in flight: a step may yield fewer tokens than were
planned. `settle` corrects them when the result comes. The device holds the true lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.request import Request
from kvasir.messages import FinishReason, Int32Array

RowNumbers = NDArray[np.int64]
NO_TOKEN = -1
NO_DRAFTS: Int32Array = np.zeros(0, np.int32)
# numpy is several times as fast with these as with members of an enum.
_GOES_ON, _STOP, _LENGTH = int(FinishReason.NONE), int(FinishReason.STOP), int(FinishReason.LENGTH)


class Rows:
    """State of all rows. Core process; no tensors."""

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        def ints() -> Int32Array:
            return np.zeros(max_rows, np.int32)

        def bools() -> NDArray[np.bool_]:
            return np.zeros(max_rows, np.bool_)

        self.num_computed = ints()  # tokens whose KV is computed or planned (upper bound)
        self.num_tokens = ints()  # tokens that exist, those still on the device included (upper bound)
        self.num_unsettled = ints()  # planned drafts in flight: the two bounds may be too high by so much
        self.num_known = ints()  # tokens that the host has seen
        self.fed_from = ints()  # from this position on, input tokens are taken from the device
        self.num_prompt = ints()
        self.limit = ints()
        self.num_computable = ints()  # tokens after which nothing is left to compute
        self.max_new = ints()  # tokens that a step can add: 0 if its tokens are external, 1 + drafts otherwise
        self.most_drafts = ints()  # drafts of a step that the request allows
        self.num_drafts = ints()  # drafts that the device has for the next step (upper bound)
        self.epoch = ints()
        self.account = ints()  # the policy's account for these tokens, see engine/queue.py ...
        self.num_counted = ints()  # ... and up to which token they were counted
        self.samples = bools()  # False: the request ends with the forward pass of its prompt
        self.stream = bools()
        self.logprobs = bools()
        self.needs_last_token = bools()
        self.guided = bools()  # its request has a guide ...
        self.restricted = bools()  # ... which holds: sampling waits for what the host learns from the step before
        self.key = np.zeros(max_rows, np.int64)
        self.stop_ids: Int32Array = np.full((max_rows, 1), NO_TOKEN, np.int32)
        # calloc: pages that no request has touched take no memory
        self.tokens: Int32Array = np.zeros((max_rows, max_model_len), np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.order: NDArray[np.int64] = np.zeros(0, np.int64)  # rows in use, first admitted first
        self.version = 0  # changes with `order`
        # Whether any request ever had these. Steps skip the arithmetic of what no request uses.
        self.any_drafts = self.any_external = self.any_guided = self.any_without_sampling = False
        self._free = list(range(max_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, num_computed: int) -> int:
        """Give the request a row and write its numbers there. The caller adds the row to `order`."""
        row, spec = self._free.pop(), request.spec
        request.row = row
        known = len(request.token_ids)
        self.requests[row] = request
        self.tokens[row, :known] = request.token_ids
        self.num_computed[row] = num_computed
        self.num_tokens[row] = self.num_known[row] = self.fed_from[row] = known
        self.num_unsettled[row] = 0
        self.num_prompt[row] = request.num_prompt_tokens
        self.limit[row] = request.limit
        self.num_computable[row] = request.num_computable
        alone = spec.external_tokens or spec.needs_last_token or request.guide is not None
        drafts = 0 if alone else spec.num_drafts
        self.max_new[row] = 0 if spec.external_tokens else 1 + drafts
        self.most_drafts[row] = drafts
        self.num_drafts[row] = 0
        self.any_drafts |= drafts > 0
        self.any_external |= spec.external_tokens
        self.any_guided |= request.guide is not None
        self.any_without_sampling |= spec.max_tokens == 0
        self.samples[row] = spec.max_tokens > 0
        self.stream[row] = spec.stream
        self.logprobs[row] = spec.sampling.logprobs is not None
        self.needs_last_token[row] = spec.needs_last_token
        self.guided[row] = request.guide is not None
        self.restricted[row] = request.guide is not None and request.guide.holds
        self.key[row] = request.key
        self._set_stop_ids(row, spec.sampling.stop_token_ids)
        return row

    def append(self, rows: list[int]) -> None:
        """Add rows to those in use."""
        self.version += 1
        self.order = np.concatenate([self.order, np.array(rows, np.int64)])

    def leave(self, rows: list[int]) -> None:
        """Free the rows. Results that they still have in flight will be dropped."""
        for row in rows:
            request = self.requests[row]
            assert request is not None, f"row {row} is free already"
            request.row = None
            self.requests[row] = None
            self._free.append(row)
        self.epoch[rows] += 1
        self.version += 1
        self.order = self.order[np.bincount(rows, minlength=len(self.requests))[self.order] == 0]

    def known_tokens(self, row: int) -> Int32Array:
        return self.tokens[row, : self.num_known[row]]

    def append_from_host(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that the host decides on. Tokens that steps in flight sample for this row are discarded."""
        known = int(self.num_known[row])
        assert self.num_computed[row] <= known, "the device has computed tokens that these would replace"
        self.tokens[row, known : known + len(tokens)] = tokens
        self.num_known[row] = self.num_tokens[row] = self.fed_from[row] = known + len(tokens)
        self.epoch[row] += 1

    def compute_last_token_again(self, row: int) -> None:
        """Let the next step compute the row's last known token once more, because a token must follow it that was not
        sampled. Tokens that steps in flight sample for this row are discarded."""
        known = int(self.num_known[row])
        self.num_computed[row] = known - 1
        self.num_tokens[row] = self.fed_from[row] = known
        self.epoch[row] += 1

    # ------------------------------------------------------------ several rows at once

    def wanted(self, rows: RowNumbers) -> Int32Array:
        """Number of tokens that each of these rows can compute in the next step."""
        want: Int32Array = np.minimum(self.num_tokens[rows], self.num_computable[rows]) - self.num_computed[rows]
        if self.any_drafts:
            room = self.num_computable[rows] - self.num_computed[rows]
            want = np.where(want == 1, np.minimum(1 + self.num_drafts[rows], room), want)
        want[self.needs_last_token[rows] & (self.num_tokens[rows] > self.num_known[rows])] = 0
        return want

    def without_drafts(self, rows: RowNumbers, want: Int32Array) -> Int32Array:
        """Return the wanted tokens, with one for each row that would verify drafts."""
        if not self.any_drafts:
            return want
        return np.where(self.num_tokens[rows] - self.num_computed[rows] == 1, np.minimum(want, 1), want)

    def advance(
        self, rows: RowNumbers, grants: Int32Array
    ) -> tuple[Int32Array, NDArray[np.bool_], Int32Array, Int32Array]:
        """Count a planned step's tokens as computed. Returns how many tokens each row has computed then, whether all
        that are known are computed, how many drafts it verifies, and how many it should have for its next step."""
        self.num_computed[rows] += grants
        computed, before = self.num_computed[rows], self.num_tokens[rows]
        samples = computed >= before
        drafts = ahead = NO_DRAFTS
        if self.any_drafts:
            drafts = np.maximum(computed - before, 0)
            self.num_unsettled[rows] += drafts
            self.num_tokens[rows] += drafts
            ahead = np.where(samples, np.maximum(self.max_new[rows] - 1, 0), 0).astype(np.int32)
            self.num_drafts[rows] = ahead
        sampling = rows[samples]
        self.num_tokens[sampling] += self.max_new[sampling] > 0 if self.any_external else 1
        return computed, samples, drafts, ahead

    def settle(self, rows: RowNumbers, drafts: Int32Array, counts: Int32Array) -> None:
        """Lower the bounds of rows whose step verified `drafts` and yielded `counts` tokens."""
        missing = np.where(drafts > 0, drafts + 1 - counts, 0)
        self.num_computed[rows] -= missing
        self.num_tokens[rows] -= missing
        self.num_unsettled[rows] -= drafts

    def unsettled(self, rows: RowNumbers) -> Int32Array | None:
        """By how much the bounds of these rows may be too high; None if they are exact."""
        return self.num_unsettled[rows] if self.any_drafts else None

    def fed_by_host(self, rows: RowNumbers) -> RowNumbers:
        """Places of the rows whose next input tokens the host knows: prompts, and tokens that the host appended."""
        return (self.num_computed[rows] < self.fed_from[rows]).nonzero()[0]

    def prompt_tokens(self, rows: RowNumbers, grants: Int32Array) -> int:
        """Number of prompt tokens among those that these rows compute in the next step."""
        return int(np.clip(self.num_prompt[rows] - self.num_computed[rows], 0, grants).sum())

    def input_tokens(self, rows: RowNumbers, grants: Int32Array, fed: RowNumbers, total: int) -> Int32Array:
        """Input ids of a step of `total` tokens; those that only the device knows are NO_TOKEN."""
        token_ids = np.full(total, NO_TOKEN, np.int32)
        if len(fed):
            start = self.num_computed[rows]
            offsets = np.cumsum(grants) - grants
            for i in fed.tolist():
                row, first, at = int(rows[i]), int(start[i]), int(offsets[i])
                count = min(int(grants[i]), int(self.fed_from[row]) - first)  # drafts follow what the host knows
                token_ids[at : at + count] = self.tokens[row, first : first + count]
        return token_ids

    def extend(self, rows: RowNumbers, tokens: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Write new tokens. Returns finish reasons (0: the request goes on) and how many tokens of each line count."""
        reasons: Int32Array = np.zeros(len(rows), np.int32)
        kept: Int32Array = np.zeros(len(rows), np.int32)
        for column in range(tokens.shape[1]):  # one column unless tokens were drafted
            line = ((reasons == _GOES_ON) & (counts > column)).nonzero()[0]
            at, new = rows[line], tokens[line, column]
            known = self.num_known[at]
            self.tokens[at, known] = new
            self.num_known[at] = known + 1
            kept[line] += 1
            stopped = new == self.stop_ids[at, 0]
            for other in range(1, self.stop_ids.shape[1]):
                stopped |= new == self.stop_ids[at, other]
            full = known + 1 >= self.limit[at]
            reasons[line] = np.where(stopped, _STOP, np.where(full, _LENGTH, _GOES_ON))
        return reasons, kept

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            missing = len(stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
