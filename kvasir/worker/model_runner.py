"""Runs a StepPlan on the device: update rows, build inputs, forward, sample.

Nothing here waits for the device. Sampled tokens are written to the rows, where the next step finds its inputs;
the host gets them later through a future. Knows tensors, rows and that there are features; never requests or text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.upload import upload
from kvasir.messages import SampleInputs, StepPlan
from kvasir.sampling.features import (
    FeatureUse,
    HeadLayout,
    HeadWork,
    HiddenReader,
    RowFeature,
    SampledLines,
    SampledRows,
)
from kvasir.sampling.registry import FeatureSettings, make_sampler
from kvasir.worker.kv_memory import KVMemory, make_host_memory
from kvasir.worker.model import Model
from kvasir.worker.step_inputs import DeviceRows, HostInputs, StepInputs, eager_inputs, host_inputs
from kvasir.worker.step_result import DeviceResult, StepOutputs

if TYPE_CHECKING:
    from kvasir.worker.graphs.keys import ForwardGraphKey, HeadGraphKey
    from kvasir.worker.graphs.step_graphs import StepGraphs

FeatureUses = list[tuple[RowFeature, FeatureUse]]  # the features that the rows of a step ask for


@dataclass(slots=True)
class Running:
    """A step whose forward pass is launched and whose sampling is not."""

    plan: StepPlan
    batch: AttentionBatch
    hidden: torch.Tensor  # of the tokens of `batch`
    readers: list[tuple[str, HiddenReader]]  # features that read hidden states, by the name of their part
    key: ForwardGraphKey | None  # of the graph that the forward pass was; None: launched kernel by kernel


@dataclass(slots=True)
class RunnerStats:
    narrowed_steps: int = 0  # steps whose last layer ran for the sequences' last tokens alone


class ModelRunner:
    def __init__(
        self,
        model: Model,
        kv_memory: KVMemory,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
        use_graphs: bool,
        logprobs_mode: str = "raw_logprobs",
        num_host_blocks: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.model = model
        self.kv_memory = kv_memory
        self.host_memory = make_host_memory(kv_memory, num_host_blocks)
        self.device = device
        spec = kv_memory.spec
        self.rows = DeviceRows(max_rows, max_model_len, spec.block_size, device, len(spec.windows))
        settings = FeatureSettings(max_rows + 1, model.vocab_size, device, logprobs_mode)
        self.sampler = make_sampler(settings, self.rows.next_token)
        self.features = self.sampler.features
        self.graphs: StepGraphs | None = None
        if use_graphs:
            from kvasir.worker.graphs.keys import graph_sizes
            from kvasir.worker.graphs.step_graphs import StepGraphs

            self.graphs = StepGraphs(model, self.rows, self.sampler, graph_sizes(max_rows), device, num_ranks)
        self.stats = RunnerStats()
        self._running: Running | None = None

    # ------------------------------------------------------------ forward

    @torch.inference_mode()
    def execute(self, plan: StepPlan, as_graph: bool = True) -> None:
        """Launch the forward pass, kernel by kernel if not `as_graph`."""
        key = self.graphs.forward_key(plan) if self.graphs is not None and as_graph else None
        packed = tuple(feature.pack(plan.new_rows) for feature in self.features) if plan.new_rows else ()
        inputs = host_inputs(plan, packed, key, self.rows.padding).to_device(self.device)
        self._update_rows(plan, inputs)
        readers = [
            (feature.part_name, reader)
            for feature in self.features
            if (reader := feature.plan_hidden(plan)) is not None
        ]
        if self.graphs is None or key is None:
            self._running = self._forward(plan, eager_inputs(self.rows, plan, inputs), readers)
            return
        step = self.graphs.forward(key, inputs)
        self._running = Running(plan, step.inputs.batch, step.hidden, readers, key)

    def _update_rows(self, plan: StepPlan, inputs: HostInputs[torch.Tensor]) -> None:
        """Bring rows, block tables and blocks to where this step begins."""
        if plan.new_rows:
            rows = inputs.new_rows[:, 0].long()
            self.rows.num_computed[rows] = inputs.new_rows[:, 1]
            for feature, packed in zip(self.features, inputs.features, strict=True):
                feature.open(plan.new_rows, rows, packed)
        if len(plan.table_index):
            self.rows.set_tables(inputs.table_index, inputs.table_block)
        if len(plan.to_host) or len(plan.from_host):
            self.host_memory.exchange(plan.to_host[:, 1], plan.from_host[:, 0], inputs.leaving, inputs.arriving)
        if len(plan.copies):
            self.kv_memory.copy_blocks(inputs.copies)

    def _forward(self, plan: StepPlan, inputs: StepInputs, readers: list[tuple[str, HiddenReader]]) -> Running:
        last = None
        if plan.num_decodes < len(plan.rows) and not readers:
            last = inputs.batch.last_tokens()
            self.stats.narrowed_steps += 1
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.batch, last)
        return Running(plan, inputs.batch if last is None else last.batch, hidden, readers, None)

    # ------------------------------------------------------------ sampling

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs | None = None) -> DeviceResult:
        """Launch sampling for the step last executed."""
        assert self._running is not None, "sample follows execute"
        running, self._running = self._running, None
        plan = running.plan
        outputs = StepOutputs(plan, inputs)
        # Readers come first: sampling may replay a graph, in whose memory the hidden states may lie.
        for name, reader in running.readers:
            outputs.add_part(name, reader.read(running.hidden, self.model.logits), reader.part)
        lines = np.flatnonzero(plan.samples).astype(np.int32)
        if len(lines):
            self._sample(running, SampledLines(plan, lines, plan.rows[lines], inputs), outputs)
        if self.graphs is not None:
            outputs.graphs = self.graphs.use
        return outputs.launch()

    def _sample(self, running: Running, sampled: SampledLines, outputs: StepOutputs) -> None:
        uses = [(feature, use) for feature in self.features if (use := feature.use(sampled)) is not None]
        if self.graphs is not None and running.key is not None:
            head = self.graphs.head_key(running.key, len(sampled.lines), uses)
            if head is not None:
                self._sample_by_graph(self.graphs, head, sampled, uses, outputs)
                return
        self._sample_eagerly(running, sampled, uses, outputs)

    def _sample_by_graph(
        self, graphs: StepGraphs, head: HeadGraphKey, sampled: SampledLines, uses: FeatureUses, outputs: StepOutputs
    ) -> None:
        """A step of single tokens samples all its lines, those too whose token is not wanted."""
        all_rows = not head.forward.is_mixed
        tokens, found = graphs.head(head, sampled, uses)
        count = len(sampled.plan.rows) if all_rows else len(sampled.lines)
        outputs.add_tokens(tokens[:count], sampled.lines, all_rows)
        for (feature, use), tensors in zip(uses, found, strict=True):
            _add_part(outputs, feature, use, [each[: use.num_entries] for each in tensors])

    def _sample_eagerly(self, running: Running, sampled: SampledLines, uses: FeatureUses, outputs: StepOutputs) -> None:
        batch, hidden, rows, lengths = running.batch, running.hidden, running.batch.rows, running.batch.seq_lens
        layout = HeadLayout(len(sampled.lines))
        arrays = [use.inputs(use.key, layout) for _, use in uses]
        every_line = len(sampled.lines) == batch.num_decodes == len(rows)  # each samples, from a single token
        uploaded: Iterator[torch.Tensor] = iter(())
        if not every_line or any(arrays):
            flat = [array for each in arrays for array in each]
            uploaded = iter(upload(flat if every_line else [sampled.lines, *flat], self.device))
        if not every_line:
            chosen = next(uploaded)
            rows, lengths, hidden = rows[chosen], lengths[chosen], hidden[batch.query_start[1:][chosen] - 1]
        step = SampledRows(sampled.rows, rows, lengths)
        work = [
            HeadWork(feature, use.key, tuple(next(uploaded) for _ in each))
            for (feature, use), each in zip(uses, arrays, strict=True)
        ]
        tokens, found = self.sampler.sample(self.model.logits(hidden), step, work)
        outputs.add_tokens(tokens, sampled.lines, step=step)
        for (feature, use), tensors in zip(uses, found, strict=True):
            _add_part(outputs, feature, use, tensors)


def _add_part(outputs: StepOutputs, feature: RowFeature, use: FeatureUse, tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        outputs.add_part(feature.part_name, tensors, use.part)
