"""Runs a StepPlan on the device: update rows, build inputs, forward, sample.

Nothing here waits for the device. Sampled tokens are written to the rows, where the next step finds its inputs;
the host gets them later through a future. Knows tensors and rows; never requests or text.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.messages import Logprobs, StepPlan, StepResult
from kvasir.sampling.sampler import Sampler, top_logprobs
from kvasir.sampling.state import Needs, SamplingState
from kvasir.worker.kv_memory import KVMemory
from kvasir.worker.rows import DeviceRows, StepInputs
from kvasir.worker.staging import DeviceResult, upload


class Model(Protocol):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    def __init__(
        self, model: Model, kv_memory: KVMemory, max_rows: int, max_model_len: int, device: torch.device
    ) -> None:
        self.model = model
        self.kv_memory = kv_memory
        self.device = device
        self.rows = DeviceRows(max_rows, max_model_len, kv_memory.spec.block_size, device)
        self.sampling = SamplingState(max_rows, device)
        self.sampler = Sampler(self.sampling)
        self._step: tuple[StepPlan, StepInputs, torch.Tensor] | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass."""
        new_rows = self.sampling.pack(plan.new_rows) if plan.new_rows else np.zeros((0, 0), np.int32)
        rows, num_tokens, token_ids, packed, index, block, copies = upload(
            [plan.rows, plan.num_tokens, plan.token_ids, new_rows, plan.table_index, plan.table_block, plan.copies],
            self.device,
        )
        if plan.new_rows:
            self._open_rows(packed.view(new_rows.shape))
        if len(plan.table_index):
            self.rows.set_tables(index, block)
        if len(plan.copies):
            self.kv_memory.copy_blocks(copies.view(-1, 2))
        inputs = self.rows.build(plan, rows.long(), num_tokens, token_ids)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.batch)
        self._step = plan, inputs, hidden

    def _open_rows(self, packed: torch.Tensor) -> None:
        rows = packed[:, 0].long()
        self.rows.num_computed[rows] = packed[:, 1]
        self.sampling.write(rows, packed)

    @torch.inference_mode()
    def sample(self) -> DeviceResult:
        """Launch sampling for the step last executed."""
        assert self._step is not None, "sample follows execute"
        (plan, inputs, hidden), self._step = self._step, None
        lines = np.flatnonzero(plan.samples)
        if not len(lines):
            return DeviceResult([], lambda: _result(plan, lines, np.zeros(0, np.int32)))
        needs = self.sampling.needs(plan.rows[lines], plan.bounds[lines], plan.wants_logprobs)
        rows, positions, last = inputs.rows, inputs.batch.seq_lens, inputs.batch.query_start[1:] - 1
        logprob_lines = needs.logprob_lines if needs.logprob_lines is not None else np.zeros(0, np.int64)
        if len(lines) < len(plan.rows) or len(logprob_lines):
            chosen, wanted = upload([lines.astype(np.int32), logprob_lines.astype(np.int32)], self.device)
            if len(lines) < len(plan.rows):
                rows, positions, last = rows[chosen], positions[chosen], last[chosen]
        logits = self.model.logits(hidden if len(last) == len(hidden) else hidden[last])
        tokens = self.sampler.sample(logits, rows, positions.long(), needs)
        self.rows.next_token[rows] = tokens.to(torch.int32)
        outputs = [tokens.to(torch.int32)]
        if len(logprob_lines):
            top = top_logprobs(logits[wanted], tokens[wanted], needs.num_logprobs)
            outputs += [top.token_ids, top.values, top.ranks]
        return DeviceResult(outputs, lambda *arrays: _result(plan, lines, *arrays, needs=needs))


def _result(plan: StepPlan, lines: NDArray[np.int64], *arrays: NDArray[Any], needs: Needs | None = None) -> StepResult:
    """What came back from the device, laid out over all rows of the plan."""
    token_ids = np.zeros((len(plan.rows), 1), np.int32)
    token_ids[lines, 0] = arrays[0]
    logprobs = None
    if needs is not None and needs.logprob_lines is not None and len(needs.logprob_lines):
        index = lines[needs.logprob_lines].astype(np.int32)
        logprobs = Logprobs(index, arrays[1], arrays[2], arrays[3])
    return StepResult(token_ids, plan.samples.astype(np.int32), logprobs)
