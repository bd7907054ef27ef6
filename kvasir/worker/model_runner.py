"""Runs a StepPlan on the device: update rows, build inputs, forward, sample.

Nothing here waits for the device. Sampled tokens are written to the rows, where the next step finds its inputs;
the host gets them later through a future. Knows tensors and rows; never requests or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.messages import Logprobs, StepPlan, StepResult
from kvasir.sampling.sampler import Sampler, top_logprobs
from kvasir.sampling.state import Needs, SamplingState
from kvasir.worker.decode_graphs import DecodeGraphs, Model, graph_sizes
from kvasir.worker.kv_memory import KVMemory
from kvasir.worker.rows import DeviceRows
from kvasir.worker.staging import DeviceResult, upload

NO_ROWS: NDArray[np.int32] = np.zeros((0, 0), np.int32)


@dataclass(slots=True)
class Running:
    """A step whose forward pass is launched and whose sampling is not."""

    plan: StepPlan
    batch: AttentionBatch
    hidden: torch.Tensor
    graph_size: int | None  # the forward was a graph of so many rows


class ModelRunner:
    def __init__(
        self,
        model: Model,
        kv_memory: KVMemory,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
        use_graphs: bool,
    ) -> None:
        self.model = model
        self.kv_memory = kv_memory
        self.device = device
        spec = kv_memory.spec
        self.rows = DeviceRows(max_rows, max_model_len, spec.block_size, device, len(spec.windows))
        self.sampling = SamplingState(max_rows + 1, device)
        self.sampler = Sampler(self.sampling, self.rows.next_token)
        self.graphs: DecodeGraphs | None = None
        if use_graphs:
            self.graphs = DecodeGraphs(model, self.rows, self.sampler, graph_sizes(max_rows), device)
        self._running: Running | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launch the forward pass."""
        size = self.graphs.size_for(plan) if self.graphs is not None else None
        new_rows = self.sampling.pack(plan.new_rows) if plan.new_rows else NO_ROWS
        all_rows = plan.rows if self.graphs is None or size is None else self.graphs.padded_rows(plan, size)
        # a step of single tokens that all come from the device needs to be told no more than its rows
        tells_tokens = size is None or bool((plan.token_ids >= 0).any())
        rows, num_tokens, token_ids, packed, index, block, copies = upload(
            [
                all_rows,
                plan.num_tokens if tells_tokens else NO_ROWS,
                plan.token_ids if tells_tokens else NO_ROWS,
                new_rows,
                plan.table_index,
                plan.table_block,
                plan.copies,
            ],
            self.device,
        )
        if plan.new_rows:
            self._open_rows(packed.view(new_rows.shape))
        if len(plan.table_index):
            self.rows.set_tables(index, block)
        if len(plan.copies):
            self.kv_memory.copy_blocks(copies.view(-1, 2))
        if self.graphs is None or size is None:
            inputs = self.rows.build(plan, rows.long(), num_tokens, token_ids)
            hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.batch)
            self._running = Running(plan, inputs.batch, hidden, None)
            return
        if tells_tokens:
            own = rows[: len(plan.rows)].long()
            self.rows.next_token[own] = torch.where(token_ids >= 0, token_ids, self.rows.next_token[own])
        step = self.graphs.forward(rows)
        self._running = Running(plan, step.inputs.batch, step.hidden, size)

    def _open_rows(self, packed: torch.Tensor) -> None:
        rows = packed[:, 0].long()
        self.rows.num_computed[rows] = packed[:, 1]
        self.sampling.write(rows, packed)

    @torch.inference_mode()
    def sample(self) -> DeviceResult:
        """Launch sampling for the step last executed."""
        assert self._running is not None, "sample follows execute"
        running, self._running = self._running, None
        plan = running.plan
        lines = np.flatnonzero(plan.samples).astype(np.int32)
        if not len(lines):
            return DeviceResult([], lambda: _result(plan, lines, None, np.zeros(0, np.int32)))
        needs = self.sampling.needs(plan.rows[lines], plan.wants_logprobs)
        if self.graphs is not None and running.graph_size is not None and needs.only_draw:
            tokens = self.graphs.head(running.graph_size)[: len(plan.rows)]
            return DeviceResult([tokens], lambda array: _result(plan, lines, needs, array[lines]))
        outputs = self._sample_eagerly(running, lines, needs)
        return DeviceResult(outputs, lambda *arrays: _result(plan, lines, needs, *arrays))

    def _sample_eagerly(self, running: Running, lines: NDArray[np.int32], needs: Needs) -> list[torch.Tensor]:
        batch, hidden = running.batch, running.hidden
        chosen, wanted = upload([lines, needs.logprob_lines], self.device)
        rows, positions = batch.rows[chosen], batch.seq_lens[chosen]
        logits = self.model.logits(hidden[batch.query_start[1:][chosen] - 1])
        tokens = self.sampler.sample(logits, rows, positions, needs)
        if not len(needs.logprob_lines):
            return [tokens]
        top = top_logprobs(logits[wanted], tokens[wanted], needs.num_logprobs)
        return [tokens, top.token_ids, top.values, top.ranks]


def _result(plan: StepPlan, lines: NDArray[np.int32], needs: Needs | None, *arrays: NDArray[Any]) -> StepResult:
    """What came back from the device, laid out over all rows of the plan."""
    token_ids = np.zeros((len(plan.rows), 1), np.int32)
    token_ids[lines, 0] = arrays[0]
    logprobs = None
    if needs is not None and len(needs.logprob_lines):
        logprobs = Logprobs(lines[needs.logprob_lines], arrays[1], arrays[2], arrays[3])
    return StepResult(token_ids, plan.samples.astype(np.int32), logprobs)
