"""Verification of drafts on the device: a step draws the model's own token at every draft, and keeps them up to the
first draft that differs. Worker process. Nothing here waits for the device.

Tokens depend on the text before, the seed and the position alone. So those that are kept are the ones that single steps
would have drawn, at any temperature and with every sampling parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from kvasir import kernels
from kvasir.kernels.layout import upload
from kvasir.kernels.reference import hash_tokens
from kvasir.messages import Int32Array, NewRow, StepPlan
from kvasir.sampling.features import LineTurn, SampledLines, SampledRows
from kvasir.worker.speculative.drafter import Drafter, DraftRows, PassDrafter, TokensTaken


@dataclass(slots=True)
class RowLines:
    """Where each row's lines stand among the lines of logits, on the device."""

    rows: torch.Tensor  # [n] int64
    starts: torch.Tensor  # [n] int32: its first line
    counts: torch.Tensor  # [n] int32: its lines: one, and one for each draft
    lengths: torch.Tensor  # [n] int32: tokens that are computed, drafts included


@dataclass(slots=True)
class Verified:
    """Results of a step with drafts that go to the host."""

    tokens: torch.Tensor  # [n, 1 + drafts] int32
    counts: torch.Tensor  # [n] int32: tokens of each row that count
    drafts: torch.Tensor  # [n] int32: drafts that wait for the row's next step
    rows: torch.Tensor  # [n] int64

    def tensors(self) -> list[torch.Tensor]:
        return [self.tokens, self.counts, self.drafts]

    def first(self, count: int) -> Verified:
        """Return the results of the first `count` rows; the others are padding."""
        return Verified(self.tokens[:count], self.counts[:count], self.drafts[:count], self.rows[:count])


class RowState(Protocol):
    """The state of rows that is corrected when drafts are rejected."""

    num_computed: torch.Tensor  # [rows] int32
    next_token: torch.Tensor  # [rows] int32
    drafts: DraftRows


class Speculation:
    """The drafts of all rows, and the drafter that makes them."""

    def __init__(self, drafter: Drafter, state: RowState) -> None:
        self.drafter = drafter
        self.state = state
        self.device = state.num_computed.device
        self.columns = torch.arange(1 + drafter.num_drafts, dtype=torch.int32, device=self.device)

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        self.state.drafts.counts.index_fill_(0, rows, 0)
        self.drafter.open(new_rows, rows)

    def begin(self, sampled: SampledLines, step: SampledRows, in_turns: bool) -> RowLines | None:
        """Prepare to draw these lines; `in_turns`: a feature learns from each token. None: every row has one line."""
        if sampled.behind is None:
            return None
        first, last = row_ends(sampled)
        counts = last - first + 1
        number = np.repeat(last - first, counts) - sampled.behind  # of each line within its row
        turns = (
            [np.flatnonzero(number == turn).astype(np.int32) for turn in range(number.max() + 1)] if in_turns else []
        )
        starts, ends, own, *turn_lines = upload([first, last, counts, *turns], self.device)
        lines = RowLines(step.rows[starts], starts, own, step.positions[ends])
        if in_turns:
            step.expected = self.expected(lines, len(sampled.behind))
            step.turns = [LineTurn(host, each.long()) for host, each in zip(turns, turn_lines, strict=True)]
        return lines

    def expected(self, lines: RowLines, num_lines: int) -> torch.Tensor:
        """[num_lines] int32: the draft that follows each line; -1: there is none, or it was not proposed."""
        drafts, columns = self.state.drafts, self.columns[:-1]
        known = columns < torch.minimum(lines.counts - 1, drafts.counts[lines.rows])[:, None]
        # what is no draft is written behind the last line
        places = torch.where(known, lines.starts[:, None] + columns, num_lines)
        found = torch.full((num_lines + 1,), -1, dtype=torch.int32, device=self.device)
        found[places.long()] = drafts.tokens[lines.rows]
        return found[:num_lines]

    def settle(
        self, tokens: torch.Tensor, step: SampledRows, lines: RowLines | None, plan: StepPlan | None = None
    ) -> Verified:
        """Accept drafts, correct the rows' lengths, and draft for the next step. `tokens` were drawn, one per line.
        Without a plan, which a graph does not have, drafts are always made."""
        state, drafter = self.state, self.drafter
        if lines is None:
            own, counts = tokens[:, None], torch.ones_like(tokens)
            taken = TokensTaken(step.rows, own, counts, step.positions + 1)
        else:
            taken = self._accept(tokens, lines, step)
        drafter.learn(taken)
        drafts = state.drafts
        if isinstance(drafter, PassDrafter):
            drafts.counts.index_fill_(0, taken.rows.long(), 0)  # see `propose`
        elif plan is None or plan.ahead is not None:
            self._set_bounds(taken, plan)
            drafter.propose(taken, drafts)
            if drafter.config.synthetic_acceptance_rate is not None:  # a measurement has drafts in every step
                drafts.counts.index_fill_(0, taken.rows.long(), drafter.num_drafts)
        else:
            drafts.counts.index_fill_(0, taken.rows.long(), 0)
        return Verified(taken.tokens, taken.counts, drafts.counts[taken.rows], taken.rows)

    def propose(self, verified: Verified, plan: StepPlan) -> Verified:
        """Draft in passes if the drafter does, after the head or its graph. `verified` holds no padding."""
        if not isinstance(self.drafter, PassDrafter) or plan.ahead is None:
            return verified
        rows, drafts = verified.rows, self.state.drafts
        taken = TokensTaken(rows, verified.tokens, verified.counts, self.state.num_computed[rows] + 1)
        self._set_bounds(taken, plan)
        self.drafter.propose(taken, drafts)
        return replace(verified, drafts=drafts.counts[rows])

    def _set_bounds(self, taken: TokensTaken, plan: StepPlan | None) -> None:
        """Add the bounds that the host knows; a graph has no plan."""
        if plan is not None:
            taken.bounds = plan.bounds[plan.samples] + 1
            taken.wanted = 0 if plan.ahead is None else min(int(plan.ahead.max()), self.drafter.num_drafts)

    def _accept(self, tokens: torch.Tensor, lines: RowLines, step: SampledRows) -> TokensTaken:
        state, drafts = self.state, self.state.drafts
        rate = self.drafter.config.synthetic_acceptance_rate
        if rate is not None:
            tokens = self._by_chance(rate, tokens, lines, step)
        own, counts = kernels.accept_drafts(
            tokens, lines.rows, lines.starts, lines.counts, drafts.tokens, drafts.counts, state.num_computed,
            state.next_token,
        )  # fmt: skip
        return TokensTaken(lines.rows, own, counts, lines.lengths + 1 - (lines.counts - counts))

    def _by_chance(self, rate: float, tokens: torch.Tensor, lines: RowLines, step: SampledRows) -> torch.Tensor:
        """Accept drafts by chance, for measurements with random weights: the text is what was drafted."""
        expected = self.expected(lines, len(tokens))
        seeds = (expected.clamp(min=0).long() << 12) + step.rows.long() + 1  # another one for every request's draft
        lucky = hash_tokens(seeds & 0xFFFFFFFF, step.positions.long(), 1)[:, 0] < rate * 2**32
        known = expected >= 0
        return torch.where(known & lucky, expected, torch.where(known & (tokens == expected), tokens ^ 1, tokens))


def row_ends(sampled: SampledLines) -> tuple[Int32Array, Int32Array]:
    """The first and the last line of each row."""
    assert sampled.behind is not None, "rows have several lines"
    last = np.flatnonzero(sampled.behind == 0).astype(np.int32)
    first = np.append(np.int32(0), last[:-1] + 1).astype(np.int32)
    return first, last
