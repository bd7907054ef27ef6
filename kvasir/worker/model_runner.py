"""Runs a StepPlan on the device: update rows, build inputs, forward, sample.

Nothing here waits for the device. Sampled tokens are written to the rows, where the next step finds its inputs;
the host gets them later through a future. Knows tensors and rows; never requests or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.shared_prefixes import SharedPrefixes
from kvasir.kernels.upload import upload
from kvasir.messages import LOGPROBS, PROMPT_LOGPROBS, NewRow, Part, SampleInputs, StepPlan, StepResult
from kvasir.sampling.logprobs import Chunk, PromptScores, TokenScores, prompt_part
from kvasir.sampling.sampler import Sampler, make_stages
from kvasir.sampling.stages import SampledRows
from kvasir.sampling.state import NO_LINES, Needs, SamplingState
from kvasir.worker.host_memory import make_host_memory
from kvasir.worker.kv_memory import KVMemory
from kvasir.worker.model import Model
from kvasir.worker.rows import DeviceRows, StepInputs
from kvasir.worker.shared_prefixes import lay_out
from kvasir.worker.staging import DeviceResult

if TYPE_CHECKING:
    from kvasir.worker.graph_shapes import HeadShape, Shape
    from kvasir.worker.step_graphs import StepGraphs

NO_ROWS: NDArray[np.int32] = np.zeros((0, 0), np.int32)
NOTHING = Needs(filters=False, bans=False, logprob_lines=NO_LINES, num_logprobs=0)


@dataclass(slots=True)
class Running:
    """A step whose forward pass is launched and whose sampling is not."""

    plan: StepPlan
    batch: AttentionBatch
    hidden: torch.Tensor  # of the tokens of `batch`
    chunks: list[Chunk]  # of prompts whose tokens are scored
    shape: Shape | None  # of the graph that the forward pass was


@dataclass(slots=True)
class RunnerStats:
    narrowed_steps: int = 0  # whose last layer ran for last tokens alone


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
        self.sampling = SamplingState(max_rows + 1, device)
        self.sampling.stages = make_stages(max_rows + 1, model.vocab_size, self.sampling, device)
        self.token_scores = TokenScores(logprobs_mode, max_rows + 1, device)
        self.sampler = Sampler(self.sampling, self.rows.next_token, self.token_scores)
        self.prompt_scores = PromptScores(max_rows, logprobs_mode.endswith("logits"), device)
        self.graphs: StepGraphs | None = None
        if use_graphs:
            from kvasir.worker.graph_shapes import graph_sizes
            from kvasir.worker.step_graphs import StepGraphs

            self.graphs = StepGraphs(model, self.rows, self.sampler, graph_sizes(max_rows), device, num_ranks)
        self.stats = RunnerStats()
        self._running: Running | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan, as_graph: bool = True) -> None:
        """Launch the forward pass; not `as_graph`: kernel by kernel, whatever graphs there may be."""
        shape = self.graphs.shape_for(plan) if self.graphs is not None and as_graph else None
        new_rows = self.sampling.pack(plan.new_rows) if plan.new_rows else NO_ROWS
        if self.graphs is not None and shape is not None:
            told = self.graphs.told(plan, shape)
        else:
            told = plan.rows, plan.num_tokens, plan.token_ids, NO_LINES, *lay_out(plan.shared, len(plan.rows))
        changes = (plan.table_index, plan.table_block, plan.copies, plan.to_host[:, 0], plan.from_host[:, 1])
        uploaded = upload([*told, new_rows, *changes], self.device)
        rows, num_tokens, token_ids, order, tokens, members, starts = uploaded[: len(told)]
        packed, index, block, copies, leaving, arriving = uploaded[len(told) :]
        shared = SharedPrefixes(tokens, members, starts)
        if plan.new_rows:
            self._open_rows(packed.view(new_rows.shape), plan.new_rows)
        if len(plan.table_index):
            self.rows.set_tables(index, block)
        if len(leaving) or len(arriving):
            self.host_memory.exchange(plan.to_host[:, 1], plan.from_host[:, 0], leaving, arriving)
        if len(plan.copies):
            self.kv_memory.copy_blocks(copies.view(-1, 2))
        if self.graphs is None or shape is None:
            inputs = self.rows.build(plan, rows.long(), num_tokens, token_ids, shared if plan.shared else None)
            self._running = self._forward(plan, inputs)
            return
        step = self.graphs.forward(shape, rows, num_tokens, token_ids, order, shared)
        self._running = Running(plan, step.inputs.batch, step.hidden, self.prompt_scores.chunks(plan), shape)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> Running:
        chunks = self.prompt_scores.chunks(plan)
        last = None
        if plan.num_decodes < len(plan.rows) and not chunks:
            last = inputs.batch.last_tokens()
            self.stats.narrowed_steps += 1
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.batch, last)
        return Running(plan, inputs.batch if last is None else last.batch, hidden, chunks, None)

    def _open_rows(self, packed: torch.Tensor, new_rows: list[NewRow]) -> None:
        rows = packed[:, 0].long()
        self.rows.num_computed[rows] = packed[:, 1]
        self.sampling.write(rows, packed)
        for keeper in (self.sampling.stages, self.token_scores, self.prompt_scores):
            keeper.open(new_rows)

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs | None = None) -> DeviceResult:
        """Launch sampling for the step last executed."""
        assert inputs is None, "no row asks for inputs of the host yet"
        assert self._running is not None, "sample follows execute"
        running, self._running = self._running, None
        plan = running.plan
        lines = np.flatnonzero(plan.samples).astype(np.int32)
        chunks = running.chunks
        # before sampling: that may replay a graph, in whose memory the hidden states may lie
        scores = self.prompt_scores.score(chunks, running.hidden, self.model.logits)
        sampled = self._sample(running, lines) if len(lines) else Sampled([], lines, NOTHING)
        graphs = None if self.graphs is None else self.graphs.use

        def finish(*arrays: NDArray[Any]) -> StepResult:
            result = sampled.result(plan, arrays[len(scores) :])
            if chunks:
                result.parts[PROMPT_LOGPROBS] = prompt_part(chunks, arrays)
            result.graphs = graphs
            return result

        return DeviceResult([*scores, *sampled.tensors], finish)

    def _sample(self, running: Running, lines: NDArray[np.int32]) -> Sampled:
        plan = running.plan
        rows = plan.rows[lines]
        needs = self.sampling.needs(rows, plan.wants_logprobs)
        if len(needs.logprob_lines):
            needs.named = self.token_scores.named.holds_any(rows[needs.logprob_lines])
        if self.graphs is not None and running.shape is not None:
            head = self.graphs.head_for(running.shape, len(lines), needs)
            if head is not None:
                return self._sample_by_graph(self.graphs, head, plan, lines, needs)
        return self._sample_eagerly(running, lines, needs)

    def _sample_by_graph(
        self, graphs: StepGraphs, head: HeadShape, plan: StepPlan, lines: NDArray[np.int32], needs: Needs
    ) -> Sampled:
        """Of a step of single tokens all lines are sampled, wanted or not."""
        all_rows = not head.forward.is_mixed
        told = graphs.told_head(head, plan, lines, needs)
        tokens, *scores = graphs.head(head, *upload(told, self.device) if any(map(len, told)) else ())
        tensors = [tokens[: len(plan.rows) if all_rows else len(lines)]]
        tensors += [part[: len(needs.logprob_lines)] for part in scores]
        return Sampled(tensors, lines, needs, all_rows=all_rows)

    def _sample_eagerly(self, running: Running, lines: NDArray[np.int32], needs: Needs) -> Sampled:
        batch, hidden, rows, lengths = running.batch, running.hidden, running.batch.rows, running.batch.seq_lens
        if not len(lines) == batch.num_decodes == len(rows):  # else every line samples, from a single token
            (chosen,) = upload([lines], self.device)
            rows, lengths, hidden = rows[chosen], lengths[chosen], hidden[batch.query_start[1:][chosen] - 1]
        step = SampledRows(running.plan.rows[lines], rows, lengths)
        scored = upload([needs.logprob_lines], self.device)[0] if len(needs.logprob_lines) else None
        tensors = self.sampler.sample(self.model.logits(hidden), step, needs, scored)
        return Sampled(list(tensors), lines, needs, step)


@dataclass(slots=True)
class Sampled:
    """What sampling left on the device: tokens, then three tensors of log-probabilities if any are wanted."""

    tensors: list[torch.Tensor]
    lines: NDArray[np.int32]  # of the plan, which sampled
    needs: Needs
    step: SampledRows | None = None
    all_rows: bool = False  # the tokens are of all the plan's lines

    def result(self, plan: StepPlan, arrays: Sequence[NDArray[Any]]) -> StepResult:
        """Laid out over all rows of the plan, once the host has the arrays."""
        token_ids = np.zeros((len(plan.rows), 1), np.int32)
        if len(self.lines):
            tokens = arrays[0][self.lines] if self.all_rows else arrays[0]
            token_ids[self.lines, 0] = tokens
            for learn in self.step.learners if self.step is not None else ():
                learn(tokens)
        failures = None
        if self.step is not None and self.step.failures:
            failures = {int(self.lines[i]): said for i, said in self.step.failures.items()}
        parts = {}
        if len(self.needs.logprob_lines):
            ids, values, ranks = arrays[1:]
            if not self.needs.named:  # a graph's are a few more than anybody wants; of named ones nobody knows here
                ids, values = (part[:, : 1 + self.needs.num_logprobs] for part in (ids, values))
            lines = self.lines[self.needs.logprob_lines]
            parts[LOGPROBS] = Part(lines, {"token_ids": ids, "ranks": ranks}, {"values": values})
        return StepResult(token_ids, plan.samples.astype(np.int32), parts, failures=failures)
