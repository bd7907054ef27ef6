"""Runs a StepPlan on the device: update rows, build inputs, forward, sample. Worker process.

Nothing here waits for the device. Sampled tokens are written to the rows, where the next step finds its inputs;
the host gets them later through a future, a `DeviceResult`. Knows tensors, rows and that there are features, none of
them by name; never requests or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch, LastTokens
from kvasir.kernels.layout import upload
from kvasir.messages import GraphUse, Int32Array, KVSpec, Part, SampleInputs, StepPlan, StepResult, empty_ints
from kvasir.sampling.features import (
    FeatureUse,
    ForwardUse,
    HeadLayout,
    HeadWork,
    HiddenReader,
    RowFeature,
    SampledLines,
    SampledRows,
    sampled_lines,
)
from kvasir.sampling.registry import FeatureSettings, make_sampler
from kvasir.worker.expert_load import ExpertLoad
from kvasir.worker.memory import KVMemory, make_host_memory
from kvasir.worker.speculative.device import Speculation, Verified
from kvasir.worker.speculative.drafter import Drafter
from kvasir.worker.step_inputs import DeviceRows, HostInputs, StepInputs, eager_inputs, host_inputs

if TYPE_CHECKING:
    from kvasir.worker.graph_keys import ForwardGraphKey, HeadGraphKey
    from kvasir.worker.step_graphs import StepGraphs

NOT_NUMBERS = "the model's logits are not numbers (NaN): its weights, or the memory of the device, may be damaged"
MakePart = Callable[[Sequence[NDArray[Any]]], Part]
FeatureUses = list[tuple[RowFeature, FeatureUse]]  # the features that the rows of a step ask for


class Model(Protocol):
    """The interface of a model for the worker, whether Kvasir, the CPU library or transformers runs its layers."""

    vocab_size: int
    poolers: Any  # PoolingHeads by task, with the methods of a dict; empty: the model generates text

    @property
    def capturable(self) -> bool:
        """Whether its steps may become CUDA graphs."""

    @property
    def runs_in_cpu_library(self) -> bool:
        """Whether the CPU library computes its steps, so that torch needs no threads of its own."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of a step, or those of `last` alone, [sequences, hidden]."""

    @property
    def recorded(self) -> torch.Tensor | None:
        """States that the last `forward` recorded, [tokens, layers * hidden]; None if nothing is recorded."""

    def record(self, layers: Sequence[int]) -> None:
        """From now on `forward` records the residual stream that enters each of these layers, and for one more than
        the last layer, the states after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        """Return the shape of the KV cache that this rank needs."""

    def page_shape(self, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one block of one layer of this rank's cache."""

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        """Give each layer its view of the cache, [blocks, *page_shape]."""

    def compile_key(self) -> str:
        """Return what the kernels of this model depend on, as text."""

    def compile_copy(self) -> Model | None:
        """A copy with one layer of each kind, which launches every kernel variant that the model does. None where its
        kernels cannot be compiled ahead."""

    def weight_bytes(self) -> int:
        """Memory of its weights on this device."""


class DeviceResult:
    """Device tensors that are being copied to the host; `finish` makes a StepResult of them once they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor], finish: Callable[..., StepResult]) -> None:
        self._finish = finish
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for target, source in zip(self._host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = [t.cpu() for t in tensors]

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return self._finish(*(t.numpy() for t in self._host))


@dataclass(slots=True)
class StepOutputs:
    """The tensors that a step leaves for the host, and how they become its StepResult."""

    plan: StepPlan
    inputs: SampleInputs | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    graphs: GraphUse | None = None
    _parts: list[tuple[str, slice, MakePart, bool]] = field(default_factory=list)
    _lines: Int32Array = field(default_factory=empty_ints)  # of the plan, which sampled
    _experts: ExpertLoad | None = None  # whose counts are the last tensor
    _tokens_at: int = -1  # which tensor the tokens are; -1: no line sampled
    _all_rows: bool = False  # whether that tensor has a token for every line of the plan
    _step: SampledRows | None = None
    _sampled: SampledLines | None = None  # set if drafts were verified

    def add_tokens(
        self, tokens: torch.Tensor, lines: Int32Array, all_rows: bool = False, step: SampledRows | None = None
    ) -> None:
        self._tokens_at, self._lines, self._all_rows, self._step = len(self.tensors), lines, all_rows, step
        self.tensors.append(tokens)

    def add_verified(self, verified: Verified, sampled: SampledLines, step: SampledRows | None = None) -> None:
        """Add the tokens of rows that may have taken several."""
        self._tokens_at, self._lines, self._step, self._sampled = len(self.tensors), sampled.lines, step, sampled
        self.tensors += verified.tensors()

    def add_part(self, name: str, tensors: Sequence[torch.Tensor], make: MakePart, of_tokens: bool = False) -> None:
        """Add a part of the result; `of_tokens`: with an entry for each token drawn, those of wrong drafts too."""
        self._parts.append((name, slice(len(self.tensors), len(self.tensors) + len(tensors)), make, of_tokens))
        self.tensors += tensors

    def add_experts(self, load: ExpertLoad) -> None:
        """Add the counts of experts. It is called last."""
        self._experts = load
        self.tensors.append(load.take())

    def launch(self) -> DeviceResult:
        """Begin to copy everything to the host."""
        return DeviceResult(self.tensors, self._result)

    def _result(self, *arrays: NDArray[Any]) -> StepResult:
        plan, step = self.plan, self._step
        failures: dict[int, str] = {}
        token_ids, counts = np.zeros((len(plan.rows), 1), np.int32), plan.samples.astype(np.int32)
        drafts = None
        if self._sampled is not None:
            token_ids, counts, drafts, failures = self._verified(*arrays[self._tokens_at : self._tokens_at + 3])
        elif self._tokens_at >= 0:
            found = arrays[self._tokens_at]
            tokens = found[self._lines] if self._all_rows else found
            if tokens.min() < 0:
                failures = {int(line): NOT_NUMBERS for line in self._lines[tokens < 0]}
                tokens = np.maximum(tokens, 0)
            token_ids[self._lines, 0] = tokens
            for call in step.on_host if step is not None else ():
                call(tokens)
        if step is not None and step.failures:
            failures |= {int(self._lines[i]): reason for i, reason in step.failures.items()}
        parts = {name: make(arrays[where]) for name, where, make, _ in self._parts}
        if self._sampled is not None and self._sampled.behind is not None:
            parts |= {name: _of_taken(parts[name], counts) for name, *_, of_tokens in self._parts if of_tokens}
        if self.inputs is not None and len(self.inputs.dropped_lines):
            counts[self.inputs.dropped_lines] = 0
            parts = _without(parts, self.inputs.dropped_lines)
        experts = None if self._experts is None else self._experts.result(arrays[-1])
        return StepResult(token_ids, counts, parts, failures or None, self.graphs, experts, drafts)

    def _verified(
        self, tokens: Int32Array, counts: Int32Array, drafts: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array, dict[int, str]]:
        """Tokens, their numbers, waiting drafts and failures, for the lines of the plan."""
        sampled, step = self._sampled, self._step
        assert sampled is not None, "drafts were verified"
        lines = sampled.lines if sampled.behind is None else sampled.lines[sampled.behind == 0]
        num_rows, width = len(self.plan.rows), int(counts.max())
        taken, broken = np.arange(tokens.shape[1]) < counts[:, None], tokens < 0
        failures = {int(line): NOT_NUMBERS for line in lines[(taken & broken).any(axis=1)]}
        flat = np.maximum(tokens, 0)
        all_tokens = np.zeros((num_rows, width), np.int32)
        all_counts, all_drafts = np.zeros((2, num_rows), np.int32)
        all_tokens[lines], all_counts[lines], all_drafts[lines] = flat[:, :width], counts, drafts
        if step is not None and step.on_host:
            per_row = np.bincount(np.searchsorted(lines, sampled.lines), minlength=len(lines))
            for call in step.on_host:
                call(flat[np.arange(tokens.shape[1]) < per_row[:, None]])
        return all_tokens, all_counts, all_drafts, failures


def _of_taken(part: Part, counts: Int32Array) -> Part:
    """Return the part without the entries of rejected drafts. Entries of a line stand side by side."""
    number = np.arange(len(part.index)) - np.searchsorted(part.index, part.index)
    own = np.flatnonzero(number < counts[part.index])
    ints = {name: values[own] for name, values in part.ints.items()}
    return Part(part.index[own], ints, {name: values[own] for name, values in part.floats.items()})


def _without(parts: dict[str, Part], dropped: Int32Array) -> dict[str, Part]:
    """Return the parts without the entries of these lines of the plan."""
    kept = {name: (part, np.flatnonzero(~np.isin(part.index, dropped))) for name, part in parts.items()}
    return {
        name: Part(
            part.index[own],
            {column: values[own] for column, values in part.ints.items()},
            {column: values[own] for column, values in part.floats.items()},
        )
        for name, (part, own) in kept.items()
        if len(own)
    }


@dataclass(slots=True)
class Running:
    """A step whose forward pass is launched and whose sampling is not."""

    plan: StepPlan
    key: ForwardGraphKey | None = None  # of the graph that the forward pass was; None: launched kernel by kernel
    # of a step that was launched kernel by kernel; a graph leaves this in its buffers
    batch: AttentionBatch | None = None
    hidden: torch.Tensor | None = None  # of the tokens of `batch`, or of all tokens of an encoder's graph
    readers: Sequence[tuple[str, HiddenReader]] = ()  # features that read hidden states, by the name of their part


@dataclass(slots=True)
class RunnerStats:
    narrowed_steps: int = 0  # steps whose last layer ran for the sequences' last tokens alone
    changed_steps: int = 0  # steps in which a feature, such as adapters, changed the forward pass


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
        max_tokens: int = 8192,  # of a step
        drafter: Drafter | None = None,  # None: every row runs its own tokens only
        further: Sequence[RowFeature] = (),  # features of the model
        expert_load: ExpertLoad | None = None,  # None: tokens are not counted by expert
    ) -> None:
        self.model = model
        self.kv_memory = kv_memory
        self.host_memory = make_host_memory(kv_memory, num_host_blocks)
        self.device = device
        spec = kv_memory.spec
        drafts = 0 if drafter is None else drafter.num_drafts
        self.rows = DeviceRows(max_rows, max_model_len, spec.block_size, device, len(spec.windows), drafts)
        self.speculation = None
        if drafter is not None:
            drafter.allocate(kv_memory.num_blocks, self.rows)
            self.speculation = Speculation(drafter, self.rows)
        poolers = dict(model.poolers.items())
        settings = FeatureSettings(max_rows + 1, model.vocab_size, device, logprobs_mode, drafts, poolers, further)
        self.sampler = make_sampler(settings, self.rows.next_token)
        self.features = self.sampler.features
        self._changing = [feature for feature in self.features if feature.changes_forward]
        self.graphs: StepGraphs | None = None
        if use_graphs:
            from kvasir.worker.graph_keys import make_graph_keys
            from kvasir.worker.step_graphs import StepGraphs

            if not poolers:
                self.sampler.parameters.reserve()
            is_captured = any(feature.is_captured for feature in self._changing)
            keys = make_graph_keys(bool(spec.windows), max_rows, max_tokens, max_model_len, drafts, is_captured)
            self.graphs = StepGraphs(model, self.rows, self.sampler, keys, device, num_ranks, self.speculation)
        self.expert_load = expert_load
        self.stats = RunnerStats()
        self._running: Running | None = None

    @property
    def _reads_states(self) -> bool:
        """Whether drafts are made from the hidden states of all tokens."""
        return self.speculation is not None and self.speculation.drafter.reads_states

    @property
    def may_change(self) -> bool:
        """Whether a feature may change the forward pass."""
        return bool(self._changing)

    # ------------------------------------------------------------ forward

    @torch.inference_mode()
    def execute(self, plan: StepPlan, as_graph: bool = True, as_changed: bool = False) -> None:
        """Launch the forward pass, kernel by kernel if not `as_graph`. `as_changed`: as if a feature changed it, to
        compile the kernels of such a pass."""
        packed = tuple(feature.pack(plan.new_rows) for feature in self.features) if plan.new_rows else ()
        readers = [
            (feature.part_name, reader)
            for feature in self.features
            if (reader := feature.plan_hidden(plan)) is not None
        ]
        use = max((feature.forward_use(plan) for feature in self._changing), default=ForwardUse.PLAIN)
        use = max(use, ForwardUse.GRAPH) if as_changed else use
        self.stats.changed_steps += use > ForwardUse.PLAIN
        key = None
        # most graphs leave hidden states of last tokens only
        is_left = self.graphs is not None and (self.graphs.leaves_all or not readers)
        if self.graphs is not None and as_graph and is_left and use < ForwardUse.EAGER:
            key = self.graphs.forward_key(plan, use > ForwardUse.PLAIN)
        inputs = host_inputs(plan, packed, key, self.rows.padding).to_device(self.device)
        if key is None or not key.longest:  # an encoder's graph reads nothing of the rows
            self._update_rows(plan, inputs)
        if self.graphs is None or key is None:
            with_rows = use > ForwardUse.PLAIN or self._reads_states
            self._running = self._forward(plan, eager_inputs(self.rows, plan, inputs, with_rows), readers, use)
        else:
            self.graphs.forward(key, inputs)
            hidden = self.graphs.buffers.hidden[: plan.total_tokens] if self.graphs.leaves_all else None
            self._running = Running(plan, key, hidden=hidden, readers=readers)

    def _update_rows(self, plan: StepPlan, inputs: HostInputs[torch.Tensor]) -> None:
        """Bring rows, block tables and blocks to where this step begins."""
        if plan.new_rows:
            rows = inputs.new_rows[:, 0].long()
            self.rows.num_computed[rows] = inputs.new_rows[:, 1]
            for feature, packed in zip(self.features, inputs.features, strict=True):
                feature.open(plan.new_rows, rows, packed)
            if self.speculation is not None:
                self.speculation.open(plan.new_rows, rows)
        if len(plan.table_index):
            self.rows.set_tables(inputs.table_index, inputs.table_block)
        if len(plan.to_host) or len(plan.from_host):
            self.host_memory.exchange(plan.to_host[:, 1], plan.from_host[:, 0], inputs.leaving, inputs.arriving)
        if len(plan.copies):
            self.kv_memory.copy_blocks(inputs.copies)
            if self.speculation is not None:
                self.speculation.drafter.copy_blocks(inputs.copies)

    def _forward(
        self, plan: StepPlan, inputs: StepInputs, readers: list[tuple[str, HiddenReader]], use: ForwardUse
    ) -> Running:
        last = None
        reads_all = bool(readers) or self._reads_states
        if plan.num_decodes < len(plan.rows) and not reads_all and plan.drafts is None:
            last = inputs.batch.last_tokens()
            self.stats.narrowed_steps += 1
        for feature in self._changing:
            feature.begin_forward(use, inputs.rows, inputs.batch.rows, last is not None, plan)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.batch, last)
        if self.speculation is not None:
            self.speculation.drafter.follow(plan, inputs, self.model.recorded)
        return Running(plan, None, inputs.batch if last is None else last.batch, hidden, readers)

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
            assert running.hidden is not None, "a graph of a step with readers leaves all states"
            outputs.add_part(name, reader.read(running.hidden, self.model.logits), reader.part)
        sampled = sampled_lines(plan, inputs)
        if len(sampled.lines):
            self._sample(running, sampled, outputs)
        if self.graphs is not None:
            outputs.graphs = self.graphs.use
        if self.expert_load is not None:
            outputs.add_experts(self.expert_load)
        return outputs.launch()

    def _sample(self, running: Running, sampled: SampledLines, outputs: StepOutputs) -> None:
        uses = [(feature, use) for feature in self.features if (use := feature.use(sampled)) is not None]
        if self.graphs is not None and running.key is not None:
            head = self.graphs.head_key(running.key, sampled, uses)
            if head is not None:
                self._sample_by_graph(self.graphs, head, running.key, sampled, uses, outputs)
                return
        self._sample_eagerly(running, sampled, uses, outputs)

    def _sample_by_graph(
        self,
        graphs: StepGraphs,
        head: HeadGraphKey,
        forward: ForwardGraphKey,
        sampled: SampledLines,
        uses: FeatureUses,
        outputs: StepOutputs,
    ) -> None:
        """A step of single tokens samples all its lines, those too whose token is not wanted."""
        all_rows = not forward.is_mixed
        tokens, found = graphs.head(head, forward, sampled, uses)
        if isinstance(tokens, Verified):
            assert self.speculation is not None, "only a drafter's tokens are verified"
            verified = self.speculation.propose(tokens.first(len(np.unique(sampled.lines))), sampled.plan)
            outputs.add_verified(verified, sampled)
        else:
            count = len(sampled.plan.rows) if all_rows else len(sampled.lines)
            outputs.add_tokens(tokens[:count], sampled.lines, all_rows)
        for (feature, use), tensors in zip(uses, found, strict=True):
            _add_part(outputs, feature, use, [each[: use.num_entries] for each in tensors])

    def _sample_eagerly(self, running: Running, sampled: SampledLines, uses: FeatureUses, outputs: StepOutputs) -> None:
        hidden, rows, lengths = self._sampling_lines(running, sampled)
        for feature in self._changing:
            feature.begin_head(rows)
        layout = HeadLayout(len(sampled.lines))
        arrays = [use.inputs(use.key, layout) for _, use in uses]
        flat = [array for each in arrays for array in each]
        uploaded: Iterator[torch.Tensor] = iter(upload(flat, self.device) if flat else ())
        step = SampledRows(sampled.rows, rows, lengths)
        row_lines = None
        if self.speculation is not None:
            row_lines = self.speculation.begin(sampled, step, in_turns=any(use.observes for _, use in uses))
        work = [
            HeadWork(feature, use.key, tuple(next(uploaded) for _ in each))
            for (feature, use), each in zip(uses, arrays, strict=True)
        ]
        tokens, found = self.sampler.sample(self.model.logits(hidden), step, work)
        if self.speculation is None:
            outputs.add_tokens(tokens, sampled.lines, step=step)
        else:
            verified = self.speculation.settle(tokens, step, row_lines, sampled.plan)
            outputs.add_verified(self.speculation.propose(verified, sampled.plan), sampled, step)
        for (feature, use), tensors in zip(uses, found, strict=True):
            _add_part(outputs, feature, use, tensors)

    def _sampling_lines(
        self, running: Running, sampled: SampledLines
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the hidden states, rows and lengths of the lines that sample."""
        lines = sampled.lines
        if self.graphs is not None and running.key is not None:
            return self.graphs.left(running.key, lines)
        batch, hidden = running.batch, running.hidden
        assert batch is not None and hidden is not None, "the step was launched kernel by kernel"
        if len(lines) == batch.num_decodes == len(batch.rows):  # each samples, from a single token
            return hidden, batch.rows, batch.seq_lens
        if sampled.behind is not None:
            chosen, behind = upload([lines, sampled.behind], self.device)
            token = batch.query_start[1:][chosen] - 1 - behind
            return hidden[token], batch.rows[chosen], batch.seq_lens[chosen] - behind
        (chosen,) = upload([lines], self.device)
        return hidden[batch.query_start[1:][chosen] - 1], batch.rows[chosen], batch.seq_lens[chosen]


def _add_part(outputs: StepOutputs, feature: RowFeature, use: FeatureUse, tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        outputs.add_part(feature.part_name, tensors, use.part, of_tokens=True)
