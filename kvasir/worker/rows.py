"""Per-request state on the device, one row per running request: block table, tokens computed, next input token.

The device's `num_computed` is the truth; the host plans with upper bounds. A step's inputs are built here from
the rows, so that a step sends only what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvasir import kernels
from kvasir.attention.base import AttentionBatch
from kvasir.kernels.shared_prefixes import SharedPrefixes
from kvasir.messages import StepPlan
from kvasir.worker.shared_prefixes import longest_own


@dataclass(slots=True)
class StepInputs:
    input_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    batch: AttentionBatch


class DeviceRows:
    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.padding = max_rows  # one row more than requests can have, for steps that are padded to a fixed size
        width = -(-max_model_len // block_size)
        self._all_tables = torch.zeros(num_groups, max_rows + 1, width, dtype=torch.int32, device=device)
        self.tables, *self.other_tables = self._all_tables  # of the first group of layers, and of the others
        self.num_computed = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.next_token = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)

    def set_tables(self, index: torch.Tensor, block: torch.Tensor) -> None:
        """Write changed block-table entries, given by their flat positions."""
        self._all_tables.view(-1)[index.long()] = block

    def build(
        self,
        plan: StepPlan,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        token_ids: torch.Tensor,
        shared: SharedPrefixes | None = None,
    ) -> StepInputs:
        """The step's inputs from the rows; counts the tokens as computed. Never waits for the device."""
        ids, positions, slots, query_start, seq_lens = kernels.step_inputs(
            rows, num_tokens, token_ids, self.num_computed, self.next_token, self.tables, self.block_size
        )
        batch = AttentionBatch(
            slots=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            tables=self.tables,
            rows=rows,
            num_decodes=plan.num_decodes,
            query_lens=plan.num_tokens,
            seq_bounds=plan.bounds,
            block_size=self.block_size,
            shared=shared,
            own_bound=longest_own(plan),
        )
        if self.other_tables:
            token_rows = torch.repeat_interleave(rows, num_tokens.long(), output_size=plan.total_tokens)
            batch.others = self.batches_of_others(batch, token_rows, positions)
        return StepInputs(ids, positions, batch)

    def batches_of_others(
        self, batch: AttentionBatch, token_rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[AttentionBatch, ...]:
        """The same step for the other groups of layers, whose tokens lie elsewhere; padding rows store nothing."""
        found = []
        for tables in self.other_tables:
            block = tables[token_rows, positions // self.block_size].long()
            slots = block * self.block_size + positions % self.block_size
            slots = torch.where(token_rows == self.padding, -1, slots)
            found.append(replace(batch, slots=slots, tables=tables, notes={}, others=()))
        return tuple(found)
