"""Top-EMA: a nucleus that widens when the distribution is flatter than it lately was. docs/sampling.md has a picture.

H_t is the mass of the `top_ema_d` likeliest tokens, m_t its moving average. The nucleus kept is the smallest set with
mass >= top_ema_p * m_t / H_t, clipped to [top_ema_p, 1].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from kvasir.messages import Extras, NewRow
from kvasir.sampling.features import SampledRows
from kvasir.sampling.stages import FORBIDDEN, Stage, bits

BETA = 0.9
UNSET = -1.0
MAX_DROPPED = 2  # steps of a row whose results may be dropped at once; wrong drafts are dropped, too


class TopEma(Stage):
    """A slot belongs to a request and not to a row, because the average must survive preemption. New requests take the
    slots of the least recent ones."""

    narrows = True
    tables = ("share", "depth", "averages", "position")

    def __init__(self, max_rows: int, temperature: torch.Tensor, device: torch.device, num_drafts: int = 0) -> None:
        super().__init__(max_rows, device)
        self.temperature = temperature  # [rows]
        self.share, self.depth = self.table(), self.table(dtype=torch.int32)
        # The average at `position`, where a token was drawn last, and the averages before it. Those count if tokens are
        # drawn again: steps in flight are dropped when their request is preempted or a step runs out of memory.
        self.max_dropped = MAX_DROPPED * (1 + num_drafts) + num_drafts
        self.averages, self.position = self.table(1 + self.max_dropped), self.table(dtype=torch.int32)
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by the request's key, least recent first
        self._most = 4 * max_rows
        self._new_slots: set[int] = set()  # taken, and not filled yet

    def asks(self, extras: Extras) -> bool:
        return extras.top_ema_p > 0 and extras.top_ema_d > 0

    def take(self, new: NewRow) -> int:
        assert new.sampling.extras is not None, "only rows with extras ask"
        key = new.sampling.extras.ema_key
        if key not in self._slot_of and len(self._slot_of) >= self._most:
            in_use = set(self.slots.tolist())
            oldest = next(old for old, slot in self._slot_of.items() if slot not in in_use)
            self._free.append(self._slot_of.pop(oldest))
        slot = self._slot_of.pop(key, None)
        if slot is None:
            slot = super().take(new)
            self._new_slots.add(slot)
        self._slot_of[key] = slot
        return slot

    def close(self, row: int) -> None:
        self.slots[row] = -1

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        asked = [extras for new in new_rows if (extras := new.sampling.extras) is not None]
        own, share, depth = self.upload(
            np.array(slots, np.int32),
            bits([extras.top_ema_p for extras in asked]),
            np.array([extras.top_ema_d for extras in asked], np.int32),
        )
        self.share[own.long()] = share.view(torch.float32)
        self.depth[own.long()] = depth
        fresh = [
            slot
            for new, extras, slot in zip(new_rows, asked, slots, strict=True)
            if slot in self._new_slots
            or new.token_ids is None
            or len(new.token_ids) == extras.num_prompt_tokens  # it has no output yet
        ]
        if fresh:
            begins = self.upload(np.array(fresh, np.int32))[0].long()
            self.averages.index_fill_(0, begins, UNSET)
            self.position.index_fill_(0, begins, -1)
        self._new_slots.clear()  # last: memory may run out before

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        lines, slots = self.lines(step)
        heat, position = self.temperature[step.rows[lines], None], step.positions[lines].to(torch.int32)
        ordered = (logits[lines] / torch.where(heat > 0, heat, 1.0)).sort(dim=-1, descending=True)
        probs = torch.softmax(ordered.values, dim=-1)
        sums = probs.cumsum(dim=-1)
        depth = self.depth[slots].clamp(max=logits.shape[-1]).long()
        mass = sums.gather(1, depth[:, None] - 1).squeeze(1)
        dropped = (self.position[slots] + 1 - position).clamp(0, self.max_dropped).long()
        ages = torch.arange(self.max_dropped, device=self.device)
        past = self.averages[slots].gather(1, (dropped[:, None] + ages).clamp(max=self.max_dropped))
        base = past[:, 0]
        average = torch.where(base < 0, mass, BETA * base + (1 - BETA) * mass)
        self.averages[slots], self.position[slots] = torch.cat([average[:, None], past], dim=1), position
        share = self.share[slots]
        goal = torch.minimum(torch.maximum(share * average / mass, share), torch.ones_like(share))
        kept = sums - probs < torch.where(goal < 1, goal, 2.0)[:, None]
        kept[:, 0] = True
        logits[lines] = logits[lines].masked_fill(~torch.zeros_like(kept).scatter(1, ordered.indices, kept), FORBIDDEN)
