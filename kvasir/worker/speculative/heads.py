"""Drafts by heads on top of the model, which read the model's hidden states: EAGLE, MTP and Medusa. The states of each
row's last tokens are kept until the token after them is drawn.

EAGLE and MTP have keys and values, in a pool of their own, in the blocks of the model's first group of layers. Their
position p is the token p + 1 with the model's states at p. A forward pass of the model therefore brings them up to the
position before its last token: the pass's tokens with the states of the tokens before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvasir.attention.base import UNBOUNDED, AttentionBatch
from kvasir.errors import ConfigError
from kvasir.messages import Int32Array, NewRow, StepPlan
from kvasir.worker.speculative.drafter import (
    DRAFTERS,
    CacheLayout,
    DrafterSettings,
    DraftPool,
    DraftRows,
    ModelInputs,
    PassDrafter,
)


class LastStates:
    """States of each row's last tokens, as many as a step may verify, at their positions modulo that number."""

    def __init__(self, max_rows: int, kept: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kept, self.padding = kept, max_rows - 1
        self.states = torch.zeros(max_rows, kept, size, dtype=dtype, device=device)

    def at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the states of these rows at these positions, [n, size]."""
        return self.states[rows, positions % self.kept]

    def keep(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        """Keep the last tokens of each row. The tokens of a row stand side by side."""
        is_last = torch.ones_like(rows, dtype=torch.bool)
        is_last[: -self.kept] = rows[self.kept :] != rows[: -self.kept]
        self.states[torch.where(is_last, rows, self.padding), positions % self.kept] = states


@DRAFTERS.register("eagle3", "eagle", "mtp")
class HeadDrafter(PassDrafter):
    """Stores keys and values together with the model, and drafts the likeliest tokens one by one."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        assert settings.load is not None and settings.record is not None, "the settings name a head"
        self.head = settings.load()
        settings.record(self.head.spec.features)
        self.capturable = self.head.capturable
        self.num_graphs = min(2, self.num_drafts)  # the first pass reads the model's states, the others the head's own
        self.pool = DraftPool(self.head, settings)
        self.block_bytes = self.pool.block_bytes
        size, dtype, device = self.head.spec.hidden_size, self.head.dtype, self.device
        self.features = LastStates(self.max_rows, 1 + self.num_drafts, size, dtype, device)  # the model's
        self.states = torch.zeros(self.max_rows, size, dtype=dtype, device=device)  # the head's own
        # Of each row, the first token that the model computed: states before it are not known.
        self.first = torch.zeros(self.max_rows, dtype=torch.int32, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # of the draft that the next pass makes

    def allocate(self, num_blocks: int, layout: CacheLayout) -> None:
        self.layout = layout
        self.pool.allocate(num_blocks, self.device)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self.pool.copy_blocks(pairs)

    def weight_bytes(self) -> int:
        return int(self.head.weight_bytes())

    def compile_key(self) -> str:
        return str(self.head.compile_key())

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        self.first[rows] = self.layout.num_computed[rows]

    def follow(self, plan: StepPlan | None, inputs: ModelInputs, states: torch.Tensor | None) -> None:
        rows, positions = inputs.rows, inputs.positions
        assert rows is not None and states is not None, "the model records states, and tokens have rows"
        features = self.head.combine(states)
        before = (positions - 1).clamp(min=0)
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[1:] = rows[1:] != rows[:-1]
        previous = torch.where(begins[:, None], self.features.at(rows, before), features.roll(1, 0))
        block_size = self.layout.block_size
        block = self.layout.tables[rows, before // block_size].long()
        # Where the states are not known, as after a cached prefix, the entry is left as it is: the null block takes it.
        slots = torch.where(positions > self.first[rows], block * block_size + before % block_size, 0)
        self.head.store(inputs.input_ids, previous, before, slots)
        self.features.keep(rows, positions, features)

    def draft(self, rows: torch.Tensor, drafts: DraftRows, bounds: Int32Array | None, number: int) -> None:
        layout, computed = self.layout, self.layout.num_computed[rows]
        if number == 0:
            self.number.zero_()
            tokens = layout.next_token[rows].clamp(min=0)
            states = self.features.at(rows, (computed - 1).clamp(min=0))
        else:
            tokens = drafts.tokens[rows, self.number - 1]
            states = self.states[rows]
        # The padding row has no token, and none of its keys is read.
        lengths = torch.where(computed > 0, (computed + self.number).clamp(max=self.max_model_len), 0).int()
        positions, block_size = (lengths - 1).clamp(min=0).long(), layout.block_size
        block = layout.tables[rows, positions // block_size].long()
        longest = np.int32(UNBOUNDED) if bounds is None else np.minimum(bounds, self.max_model_len).astype(np.int32)
        batch = AttentionBatch(
            slots=torch.where(lengths > 0, block * block_size + positions % block_size, 0),
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device),
            seq_lens=lengths,
            tables=layout.tables,
            rows=rows,
            num_decodes=len(rows),
            query_lens=np.ones(len(rows), np.int32),
            seq_bounds=np.broadcast_to(longest, len(rows)),
            block_size=block_size,
        )
        found, states = self.head(tokens.long(), states, positions, batch)
        self.states[rows] = states
        drafts.tokens[rows, self.number] = found.int()
        self.number += 1
        drafts.counts[rows] = self.number.int()


@DRAFTERS.register("medusa")
class MedusaDrafter(PassDrafter):
    """Each pass is another head, and all of them read the model's last states."""

    capturable = True

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        assert settings.load is not None and settings.record is not None, "the settings name heads"
        self.heads = settings.load()
        settings.record(self.heads.spec.features)
        self.num_graphs, spec = self.num_drafts, self.heads.spec
        if self.num_drafts > spec.num_heads:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is {self.num_drafts}, but there are {spec.num_heads} "
                f"Medusa heads; set it to at most {spec.num_heads}."
            )
        size, dtype = spec.hidden_size, self.heads.dtype
        self.features = LastStates(self.max_rows, 1 + self.num_drafts, size, dtype, self.device)

    def allocate(self, num_blocks: int, layout: CacheLayout) -> None:
        self.layout = layout

    def weight_bytes(self) -> int:
        return int(self.heads.weight_bytes())

    def compile_key(self) -> str:
        return str(self.heads.compile_key())

    def follow(self, plan: StepPlan | None, inputs: ModelInputs, states: torch.Tensor | None) -> None:
        assert inputs.rows is not None and states is not None, "the model records states, and tokens have rows"
        self.features.keep(inputs.rows, inputs.positions, states)

    def draft(self, rows: torch.Tensor, drafts: DraftRows, bounds: Int32Array | None, number: int) -> None:
        last = (self.layout.num_computed[rows] - 1).clamp(min=0)
        drafts.tokens[rows, number] = self.heads(self.features.at(rows, last), number).int()
        drafts.counts.index_fill_(0, rows, number + 1)
