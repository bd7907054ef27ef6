"""Steps as CUDA graphs: two replays instead of some hundred launches.

A step is padded to the next size that has a graph. The forward graph reads which rows run, and how many tokens of each,
from fixed buffers and everything else from the rows on the device. It leaves the hidden states of the lines that sample
in a fixed buffer; the head graph turns them into tokens and runs the features that rows ask for. All are captured
before the first request. Worker process; imports Triton.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvasir import kernels
from kvasir.attention.base import UNBOUNDED
from kvasir.kernels.layout import upload
from kvasir.log import get_logger
from kvasir.messages import GraphUse, Int32Array, StepPlan
from kvasir.sampling.features import (
    NO_LINES,
    FeatureUse,
    ForwardUse,
    HeadLayout,
    HeadWork,
    RowFeature,
    SampledLines,
    SampledRows,
    Uses,
)
from kvasir.sampling.sampler import Sampler
from kvasir.worker.graph_keys import DraftGraphKey, EncoderGraphKeys, ForwardGraphKey, GraphKeys, HeadGraphKey
from kvasir.worker.graph_memory import Captured, EncoderBuffers, GraphBuffers, GraphPool
from kvasir.worker.memory import is_out_of_memory
from kvasir.worker.speculative.device import RowLines, Speculation, Verified, row_ends
from kvasir.worker.speculative.drafter import PassDrafter
from kvasir.worker.step_inputs import DeviceRows, HostInputs, padded

if TYPE_CHECKING:
    from kvasir.worker.model_runner import Model

logger = get_logger(__name__)
Outputs = tuple[tuple[torch.Tensor, ...], ...]  # of each feature
HeadOutputs = tuple[torch.Tensor | Verified, Outputs]  # see Sampler.sample and Speculation.settle


@dataclass(slots=True)
class GraphStats:
    replays: int = 0
    mixed_steps: int = 0
    shared_prefix_steps: int = 0
    ordered_steps: int = 0
    changed_steps: int = 0  # in which a feature, such as adapters, changed the forward pass
    stale_heads: int = 0  # heads that ran without their graph, because it reads a table that was replaced
    passes: int = 0  # in which a drafter drafted one token for each row
    heads: Counter[str] = field(default_factory=Counter)  # replays of heads by what their features do


@dataclass(slots=True)
class HeadGraph:
    captured: Captured[HeadOutputs]
    versions: tuple[int, ...]  # of the tables that its features read


class StepGraphs:
    def __init__(
        self,
        model: Model,
        state: DeviceRows,
        sampler: Sampler,
        keys: GraphKeys | EncoderGraphKeys,
        device: torch.device,
        num_ranks: int = 1,  # other ranks capture the same graphs, and would wait for a rank that does not
        speculation: Speculation | None = None,
    ) -> None:
        self.speculation = speculation
        self.model, self.sampler, self.keys, self.device, self.num_ranks = model, sampler, keys, device, num_ranks
        self.stats = GraphStats()
        self.leaves_all = isinstance(keys, EncoderGraphKeys)  # the hidden states of all tokens
        self.buffers: Any = (EncoderBuffers if self.leaves_all else GraphBuffers)(state, keys.max_size, device)
        self.pool = GraphPool(device)
        self.forwards: dict[ForwardGraphKey, Captured[None]] = {}
        self.heads: dict[HeadGraphKey, HeadGraph] = {}
        self.passes: dict[DraftGraphKey, Captured[None]] = {}
        self.drafter: PassDrafter | None = None
        if speculation is not None and isinstance(speculation.drafter, PassDrafter):
            self.drafter, speculation.drafter.replay = speculation.drafter, self.draft
        self.late_captures = 0
        self._padding_row = state.padding

    # ------------------------------------------------------------ capture

    def head_keys(self) -> Iterator[HeadGraphKey]:
        """All head keys, the largest first: each feature is left out or has one of its keys for graphs."""
        for size in reversed(self.keys.head_sizes):
            choices = [(None, *feature.graph_keys(size)) for feature in self.sampler.features]
            for keys in product(*choices):
                pairs = zip(self.sampler.features, keys, strict=True)
                yield HeadGraphKey(size, tuple((feature, key) for feature, key in pairs if key is not None))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every graph. The largest comes first, so that the others find room in the memory that it leaves."""
        forwards, heads, passes = list(self.keys.forwards()), list(self.head_keys()), list(self.pass_keys())
        self.late_captures += self.stats.replays > 0
        try:
            with _no_garbage_collection():
                self.buffers.clear()
                for key in forwards:
                    self.forwards[key] = self.pool.capture(partial(self._forward, key, self.model))
                for head in heads:
                    for feature, own in head.uses:
                        feature.clear(own, head.rows)
                    captured = self.pool.capture(partial(self._head, head))
                    self.heads[head] = HeadGraph(captured, versions_of(head.uses))
                for one in passes:
                    self.passes[one] = self.pool.capture(partial(self._draft, one))
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.num_ranks > 1:
                raise
            reason = str(error).partition("\n")[0]
        else:
            return
        torch.cuda.empty_cache()  # after the error is gone, whose traceback holds tensors
        logger.warning(
            "there is memory for %d of %d CUDA graphs only: %s. Steps of other sizes are launched kernel by kernel, "
            "which takes longer. To avoid this, lower gpu_memory_utilization or kv_cache_memory_bytes.",
            self._count, len(forwards) + len(heads) + len(passes), reason,
        )  # fmt: skip

    @torch.inference_mode()
    def precompile(self, model: Model) -> None:
        """Launch the kernels of every graph without capturing anything (see kernels.precompile). `model` launches all
        kernel variants of the real one. A decoder's change at powers of two, so that other sizes add none."""
        self.buffers.clear()
        for key in self.keys.forwards():
            if (
                self.leaves_all
                or key.tokens.bit_count() == 1
                or key.tokens in (self.keys.max_size, self.keys.sizes[-1])
            ):
                self._forward(key, model)
        for head in self.head_keys():
            if head.rows.bit_count() == 1 or head.rows in (self.keys.sizes[-1], self.keys.head_sizes[-1]):
                for feature, own in head.uses:
                    feature.clear(own, head.rows)
                self._head(head)
        for one in self.pass_keys():
            if one.rows.bit_count() == 1 or one.rows == self.keys.sizes[-1]:
                self._draft(one)

    def measure(self) -> list[tuple[int, float]]:
        """Tokens and seconds of steps, replayed on padding rows: first of a step of single tokens, then of mixed ones.
        Empty if a graph is missing."""
        if not self.keys.sizes:
            return []
        sizes = [size for size in self.keys.sizes if size <= 16]
        steps = [ForwardGraphKey(sizes[-1], sizes[-1], UNBOUNDED)]
        drafts = self.keys.num_drafts
        mixed = [(tokens, rows[0]) for tokens, rows in self.keys.mixed_rows.items() if tokens >= 128]
        steps += [ForwardGraphKey(tokens, rows, UNBOUNDED, drafts=drafts) for tokens, rows in mixed]
        if len(steps) < 2 or any(key not in self.forwards for key in steps):
            return []
        self.buffers.clear()
        return [(key.tokens, self._time(self.forwards[key].graph)) for key in steps]

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of the better of two replays, after one."""
        times = []
        for _ in range(3):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        return min(times[1:])

    @property
    def use(self) -> GraphUse:
        size = self.num_ranks * self.pool.taken  # ranks are alike
        return GraphUse(self._count, size, kernels.late_compilations(), self.late_captures)

    @property
    def _count(self) -> int:
        return len(self.forwards) + len(self.heads) + len(self.passes)

    # ------------------------------------------------------------ forward passes

    def forward_key(self, plan: StepPlan, is_changed: bool = False) -> ForwardGraphKey | None:
        """The graph that this step runs as; None: it is launched kernel by kernel. `is_changed`: a feature changes the
        forward pass."""
        key = self.keys.fit(plan)
        if is_changed and key is not None:
            key = replace(key, is_changed=True)
        return key if key in self.forwards else None

    def forward(self, key: ForwardGraphKey, inputs: HostInputs[torch.Tensor]) -> None:
        """Replay a step with these inputs. What it computes is in the buffers."""
        self.buffers.write(key, inputs)
        self.forwards[key].graph.replay()
        stats = self.stats
        stats.replays += 1
        stats.mixed_steps += key.is_mixed
        stats.shared_prefix_steps += key.shares
        stats.ordered_steps += key.is_ordered
        stats.changed_steps += key.is_changed

    def _forward(self, key: ForwardGraphKey, model: Model) -> None:
        inputs = self.buffers.step_inputs(key)
        last = None if self.leaves_all or key.drafts or not key.is_mixed else inputs.batch.last_tokens()
        use = ForwardUse.GRAPH if key.is_changed else ForwardUse.PLAIN
        for feature in self.sampler.features:
            if feature.changes_forward:
                feature.begin_forward(use, inputs.rows, inputs.batch.rows, last is not None, None)
        hidden = model.forward(inputs.input_ids, inputs.positions, inputs.batch, last)
        if self.speculation is not None:
            self.speculation.drafter.follow(None, inputs, model.recorded)
        self.buffers.leave(key, hidden, inputs)

    def left(self, key: ForwardGraphKey, lines: Int32Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, rows and lengths of the lines that sample, as the last forward pass left them."""
        buffers = self.buffers
        if key.is_mixed or lines[-1] == len(lines) - 1:  # they stand first
            return buffers.hidden[: len(lines)], buffers.rows[: len(lines)], buffers.lengths[: len(lines)]
        (chosen,) = upload([lines], self.device)
        return buffers.hidden[chosen], buffers.rows[chosen], buffers.lengths[chosen]

    # ------------------------------------------------------------ heads

    def head_key(
        self, forward: ForwardGraphKey, sampled: SampledLines, uses: list[tuple[RowFeature, FeatureUse]]
    ) -> HeadGraphKey | None:
        """The graph that samples these lines of the forward pass last replayed; None: there is none."""
        if sampled.behind is not None and any(use.observes for _, use in uses):
            return None  # lines are drawn in turns, of which there is no graph
        assert isinstance(self.keys, GraphKeys), "an encoder samples nothing"
        rows = self.keys.head_rows(len(sampled.lines)) if forward.is_mixed else forward.rows
        chosen = []
        for feature, use in uses:
            own = feature.graph_key(use.key, rows) if use.capturable else None
            if own is None:
                return None
            chosen.append((feature, own))
        key = HeadGraphKey(rows, tuple(chosen))
        head = self.heads.get(key)
        if head is None:
            return None
        if head.versions != versions_of(key.uses):
            self.stats.stale_heads += 1
            return None
        return key

    def head(
        self,
        key: HeadGraphKey,
        forward: ForwardGraphKey,
        sampled: SampledLines,
        uses: list[tuple[RowFeature, FeatureUse]],
    ) -> HeadOutputs:
        """Tokens [rows] of the forward replayed last, and the features' outputs; those of padding mean nothing."""
        arrays, buffers = self._head_inputs(key, forward, sampled, uses)
        if any(map(len, arrays)):
            for buffer, part in zip(buffers, upload(arrays, self.device), strict=True):
                if len(part):
                    buffer[: len(part)] = part
        captured = self.heads[key].captured
        captured.graph.replay()
        for feature, own in key.uses:
            for label in feature.labels(own):
                self.stats.heads[label] += 1
        return captured.outputs

    def _head_inputs(
        self,
        key: HeadGraphKey,
        forward: ForwardGraphKey,
        sampled: SampledLines,
        uses: list[tuple[RowFeature, FeatureUse]],
    ) -> tuple[list[Int32Array], list[torch.Tensor]]:
        """What the host sends for a head, and where each array goes."""
        plan, lines, rows = sampled.plan, sampled.lines, NO_LINES
        if not forward.is_mixed and len(lines) < len(plan.rows) and any(use.observes for _, use in uses):
            # All rows draw here. Features must not count what rows draw that do not sample.
            rows = padded(np.where(plan.samples, plan.rows, self._padding_row), key.rows, self._padding_row)
        arrays, buffers = [rows], [self.buffers.rows]
        layout = HeadLayout(key.rows, None if forward.is_mixed else lines)
        for (feature, own), (_, use) in zip(key.uses, uses, strict=True):
            arrays += use.inputs(own, layout)
            buffers += feature.buffers(own, key.rows)
        if self.speculation is not None:
            arrays += self._row_lines(key, sampled, layout)
            buffers += self.buffers.row_lines.unbind(0)
        return arrays, buffers

    def _row_lines(self, key: HeadGraphKey, sampled: SampledLines, layout: HeadLayout) -> list[Int32Array]:
        """The rows that sample, their first lines and their numbers of lines, padded."""
        if sampled.behind is None:
            first = last = layout.places(np.arange(len(sampled.lines), dtype=np.int32))
            rows = sampled.rows
        else:
            first, last = row_ends(sampled)
            rows = sampled.rows[first]
        filled = ((rows, self._padding_row), (first, 0), (last - first + 1, 1))
        return [padded(values, key.rows, value) for values, value in filled]

    def _head(self, key: HeadGraphKey) -> HeadOutputs:
        buffers, size = self.buffers, key.rows
        work = [HeadWork(feature, use, feature.buffers(use, size)) for feature, use in key.uses]
        step = SampledRows(NO_LINES, buffers.rows[:size], buffers.lengths[:size])
        tokens, found = self.sampler.sample(self.model.logits(buffers.hidden[:size]), step, work)
        if self.speculation is None:
            return tokens, found
        rows, starts, counts = buffers.row_lines[:, :size].unbind(0)
        lines = RowLines(rows.long(), starts, counts, step.positions[starts + counts - 1])
        return self.speculation.settle(tokens, step, lines), found

    # ------------------------------------------------------------ drafts

    def pass_keys(self) -> Iterator[DraftGraphKey]:
        """All keys of passes that draft one token for each row, the largest first."""
        if self.drafter is not None:
            for size in reversed(self.keys.sizes):
                yield from (DraftGraphKey(size, number) for number in range(self.drafter.num_graphs))

    def draft(self, rows: torch.Tensor, count: int) -> bool:
        """Replay `count` passes that draft for these rows; False: there are no graphs for so many rows."""
        assert self.drafter is not None, "drafts are made in passes"
        size, last = next((size for size in self.keys.sizes if size >= len(rows)), 0), self.drafter.num_graphs - 1
        keys = [DraftGraphKey(size, min(number, last)) for number in range(count)]
        if any(key not in self.passes for key in keys):
            return False
        waiting = self.buffers.drafting
        waiting[: len(rows)] = rows
        waiting[len(rows) : size] = self._padding_row
        for key in keys:
            self.passes[key].graph.replay()
        self.stats.passes += count
        return True

    def _draft(self, key: DraftGraphKey) -> None:
        assert self.drafter is not None and self.speculation is not None, "drafts are made in passes"
        rows = self.buffers.drafting[: key.rows]
        self.drafter.draft(rows, self.speculation.state.drafts, None, key.number)


def versions_of(uses: Uses) -> tuple[int, ...]:
    """Versions of the tables that these features read now."""
    return tuple(version for feature, key in uses for version in feature.versions(key))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collections take a third of the time of captures, which leave no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
