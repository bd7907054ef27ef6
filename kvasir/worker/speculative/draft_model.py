"""Drafts by a second, smaller model with the same vocabulary. It has its own memory for keys and values, in the blocks
of the model's first group of layers: block tables, cached prefixes and preemption are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.layout import upload
from kvasir.messages import Int32Array, NewRow, StepPlan
from kvasir.worker.speculative.drafter import (
    DRAFTERS,
    CacheLayout,
    Drafter,
    DrafterSettings,
    DraftPool,
    DraftRows,
    ModelInputs,
    TokensTaken,
)


@DRAFTERS.register("draft_model")
class ModelDrafter(Drafter):
    """Computes prompts together with the model, and drafts the likeliest tokens one by one."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        assert settings.load is not None, "the settings name a draft model"
        self.model = settings.load()
        self.pool = DraftPool(self.model, settings)
        self.block_bytes = self.pool.block_bytes
        self.newest = torch.zeros(self.max_rows, dtype=torch.int32, device=self.device)  # each row's last token ...
        self.before = torch.zeros(self.max_rows, dtype=torch.int32, device=self.device)  # ... and the one before it

    def allocate(self, num_blocks: int, layout: CacheLayout) -> None:
        self.layout = layout
        self.pool.allocate(num_blocks, self.device)

    def weight_bytes(self) -> int:
        return int(self.model.weight_bytes())

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self.pool.copy_blocks(pairs)

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        last = [0 if new.token_ids is None else int(new.token_ids[-1]) for new in new_rows]
        self.newest[rows] = upload([np.array(last, np.int32)], self.device)[0]

    def follow(self, plan: StepPlan | None, inputs: ModelInputs, states: torch.Tensor | None) -> None:
        """Compute prompts. Tokens that rows generate are computed when drafts are made."""
        assert plan is not None, "a draft model runs outside graphs"
        if (plan.token_ids >= 0).any():
            batch = replace(inputs.batch, other_groups=(), shared=None, own_bound=None, order=None, step_cache={})
            self.model.forward(inputs.input_ids, inputs.positions, batch)

    def learn(self, taken: TokensTaken) -> None:
        rows, last = taken.rows, (taken.counts - 1).long()[:, None]
        second = taken.tokens.gather(1, (last - 1).clamp(min=0)).squeeze(1)
        self.before[rows] = torch.where(taken.counts > 1, second, self.newest[rows])
        self.newest[rows] = taken.tokens.gather(1, last).squeeze(1).clamp(min=0)

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        assert taken.bounds is not None, "a draft model runs outside graphs"
        rows, count = taken.rows, taken.wanted or self.num_drafts
        # The token before the newest is computed again: if all drafts were right, the last of them has not been.
        ids = torch.stack([self.before[rows], self.newest[rows]], dim=1).view(-1)
        ends = torch.stack([taken.lengths - 1, taken.lengths], dim=1).view(-1)
        hidden = self._forward(ids, rows.repeat_interleave(2), ends, np.repeat(taken.bounds, 2))[1::2]
        for draft in range(count):
            if draft:
                hidden = self._forward(ids, rows, taken.lengths + draft, taken.bounds + draft)
            ids = self.model.logits(hidden).argmax(dim=-1).to(torch.int32)
            drafts.tokens[rows, draft] = ids
        drafts.counts[rows] = count

    def _forward(
        self, ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, bounds: Int32Array
    ) -> torch.Tensor:
        """Hidden states of one token for each entry of `rows`, after which its text has this length."""
        lengths = lengths.clamp(max=self.max_model_len)
        positions, block_size = (lengths - 1).long(), self.layout.block_size
        block = self.layout.tables[rows, positions // block_size].long()
        batch = AttentionBatch(
            slots=block * block_size + positions % block_size,
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            tables=self.layout.tables,
            rows=rows,
            num_decodes=len(rows),
            query_lens=np.ones(len(rows), np.int32),
            seq_bounds=np.minimum(bounds, self.max_model_len).astype(np.int32),
            block_size=block_size,
        )
        hidden: torch.Tensor = self.model.forward(ids.long(), positions, batch)
        return hidden
