"""What a feature brings to the rows of a step: the one seam between the model runner and everything that requests ask
for beyond plain tokens. Worker process; knows rows, plans and tensors. Nothing here waits for the device.

How to add a feature
--------------------
A rule that only changes logits is a Stage (sampling/stages.py), added to `make_stages` in sampling/registry.py. For
anything else write a subclass of RowFeature in its own file and add it to `make_features` there. The runner, the graphs
and the sampler call it; they know no feature by name. tests/cpu/test_features.py has a complete example in 50 lines.
Override only the methods that you need:

1. A request takes a row: `pack` puts its parameters into the step's one upload (int32; floats travel by their bits),
   and `open` writes them into the feature's columns on the device. Columns have one entry per row.
2. A step runs: `plan_hidden` says whether the feature reads the hidden states of this step (prompt log-probabilities
   do). It returns a HiddenReader, or None.
   A feature that changes the forward pass itself (adapters do) says so in `forward_use`, and `begin_forward` prepares
   each such pass; graphs of changed passes are captured beside the others (`changes_forward`).
3. The step samples: `use` looks at the rows that sample and returns a FeatureUse, or None if no row asks. A feature
   that no row asks for costs nothing more. The use's `key` says what has to be computed; the methods below get it:
   `edit_logits` before the draw, `replace_tokens` and `observe` after it, `outputs` for tensors that the host gets.
   `FeatureUse.part` turns those into a Part of the result, which travels under `part_name`.
4. Such a step may be a CUDA graph. Heads are captured before the first request, one for each combination of the keys
   that features name in `graph_keys`; `graph_key` says which of those serves a use, or that none does and the head is
   launched kernel by kernel. So a key holds nothing that differs from step to step. Numbers that do (lines, masks) are
   `FeatureUse.inputs`, int32 arrays which a graph finds in the fixed `buffers`. A feature whose tables may be replaced
   by larger ones counts `versions`, so that graphs which read the old tables are not used. FeatureUse.capturable is
   False for work that a graph cannot do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import Int32Array, NewRow, Part, SampleInputs, StepPlan

NO_LINES: Int32Array = np.zeros(0, np.int32)
NO_COLUMNS: Int32Array = np.zeros((0, 0), np.int32)
Head = Callable[[torch.Tensor], torch.Tensor]  # hidden states [n, hidden] -> logits [n, vocabulary]


@dataclass(slots=True)
class SampledLines:
    """The lines of a plan that sample, as the host knows them. A row that verifies drafts has a line for each of them
    and one more, side by side."""

    plan: StepPlan
    lines: Int32Array  # [n] lines of the plan
    rows: Int32Array  # [n]
    inputs: SampleInputs | None = None  # what the host learned after it launched the forward pass
    behind: Int32Array | None = None  # [n] lines of the same row that follow; None: every row has one line


def sampled_lines(plan: StepPlan, inputs: SampleInputs | None) -> SampledLines:
    lines = np.flatnonzero(plan.samples).astype(np.int32)
    if plan.drafts is None or not len(lines):
        return SampledLines(plan, lines, plan.rows[lines], inputs)
    counts = 1 + plan.drafts[lines]
    ends = np.cumsum(counts, dtype=np.int32)
    behind = np.repeat(ends, counts) - 1 - np.arange(ends[-1], dtype=np.int32)
    lines = np.repeat(lines, counts)
    return SampledLines(plan, lines, plan.rows[lines], inputs, behind)


@dataclass(slots=True)
class HeadLayout:
    """Where the lines that sample stand among the lines of logits."""

    size: int  # lines of logits, padding included
    lines: Int32Array | None = None  # [n] line of logits of each line that samples; None: they stand side by side

    def places(self, index: Int32Array) -> Int32Array:
        """The lines of logits of some of the lines that sample."""
        return index if self.lines is None else self.lines[index]


@dataclass(slots=True)
class SampledRows:
    """The lines of logits, as the device knows them. A graph runs with these, so it must not read `host_rows`."""

    host_rows: NDArray[np.int32]  # [n]; empty in a graph
    rows: torch.Tensor  # [n]
    positions: torch.Tensor  # [n] position of each token that is drawn
    # Called with the tokens [n] once the host has them.
    on_host: list[Callable[[NDArray[np.int32]], None]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)  # by line: why its request cannot go on
    # Set where rows have several lines and a feature learns from each token: lines are drawn in turns, the rows' first
    # lines, then their second ones, and so on. A line counts if the token before is the draft that the line follows.
    turns: Sequence[LineTurn] = ()
    expected: torch.Tensor | None = None  # [n] int32: the draft that the row's next line follows; -1: there is none
    lines: torch.Tensor | None = None  # [n] in a turn: which lines of the whole step these are
    observed_rows: torch.Tensor | None = None  # [n] in a turn: the padding row stands for lines that do not count

    def select(self, turn: LineTurn) -> SampledRows:
        """The lines of one turn."""
        host_rows = self.host_rows[turn.host_lines] if len(self.host_rows) else self.host_rows
        lines = turn.lines
        return SampledRows(host_rows, self.rows[lines], self.positions[lines], lines=lines)

    def as_observed(self) -> SampledRows:
        """The same lines for `observe`."""
        return self if self.observed_rows is None else replace(self, rows=self.observed_rows)


@dataclass(slots=True)
class LineTurn:
    """Lines that are drawn at once: at most one of each row."""

    host_lines: Int32Array  # [m]; empty in a graph
    lines: torch.Tensor  # [m] int64


@dataclass(slots=True)
class Drawn:
    """A draw and what it was made from."""

    raw: torch.Tensor  # [n, vocabulary] the model's logits
    processed: Callable[[], torch.Tensor]  # those that were drawn from, divided by temperature
    tokens: torch.Tensor  # [n] int32
    step: SampledRows


@dataclass(slots=True)
class FeatureUse:
    """What the rows of one step ask of a feature, on the host."""

    key: Any  # hashable: what has to be computed
    capturable: bool = True
    observes: bool = False  # drawn tokens change the feature's state, so lines that only pad a graph must not count
    num_entries: int = 0  # entries of each output tensor; a graph's may have more, for padding

    def inputs(self, key: Any, layout: HeadLayout) -> tuple[Int32Array, ...]:
        """This step's numbers. `key` is the use's own, or the one that a graph was captured for."""
        return ()

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        """The host's copy of `outputs` as a part of the result; its index are lines of the plan."""
        raise NotImplementedError(f"{type(self).__name__} has outputs and makes no part of them")


class ForwardUse(IntEnum):
    """What a feature does to the forward pass of a step. The largest of all features counts."""

    PLAIN = 0  # nothing
    GRAPH = 1  # it changes the pass in a way that graphs are captured for
    EAGER = 2  # it changes the pass, which must be launched kernel by kernel


class HiddenReader(ABC):
    """Work on the hidden states of one step, before it samples."""

    @abstractmethod
    def read(self, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
        """Tensors for the host. `hidden` has a line for each token of the step."""

    @abstractmethod
    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        """The host's copy of them as a part of the result; its index are lines of the plan."""


class RowFeature:
    """One feature, for all rows of a worker. The module's docstring says when each method is called."""

    part_name = ""  # of what it adds to the result; one of messages.py

    def __repr__(self) -> str:
        return type(self).__name__

    # ------------------------------------------------------------ a request takes a row

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        """[len(new_rows), any width] what the device must know of new rows."""
        return NO_COLUMNS

    def open(self, new_rows: list[NewRow], rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Take the rows over from their former requests. `rows` [n] int64 and what `pack` made are on the device."""
        return None

    # ------------------------------------------------------------ a step

    def plan_hidden(self, plan: StepPlan) -> HiddenReader | None:
        """What the feature computes from this step's hidden states. Called once per step, before the forward pass."""
        return None

    changes_forward = False  # whether `forward_use` may be other than PLAIN
    is_captured = True  # whether graphs are captured for the passes that it changes: `forward_use` may be GRAPH

    def forward_use(self, plan: StepPlan) -> ForwardUse:
        """What the feature does to this step's forward pass."""
        return ForwardUse.PLAIN

    def begin_forward(
        self,
        use: ForwardUse,  # of all features together
        token_rows: torch.Tensor | None,  # [tokens] the row of each token; None in a plain pass
        rows: torch.Tensor,  # [sequences] the row of each sequence
        has_last: bool,  # the last layer goes on with each sequence's last token alone
        plan: StepPlan | None,  # None while a graph is captured
    ) -> None:
        """Prepare the forward pass that is launched or captured next."""
        return None

    def begin_head(self, rows: torch.Tensor) -> None:
        """Prepare the logits of these rows, in a step that is launched kernel by kernel."""
        return None

    def use(self, sampled: SampledLines) -> FeatureUse | None:
        """What the lines that sample ask for; None: nothing."""
        return None

    # ------------------------------------------------------------ sampling on the device, by key

    def edits_logits(self, key: Any) -> bool:
        return False

    def edit_logits(self, key: Any, logits: torch.Tensor, step: SampledRows, inputs: tuple[torch.Tensor, ...]) -> None:
        """Change float32 logits [n, vocabulary] in place, before filters and the draw."""
        return None

    def replace_tokens(
        self, key: Any, tokens: torch.Tensor, step: SampledRows, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """The tokens [n] int32 that stand in place of those drawn; the same tensor where none is replaced."""
        return tokens

    def observe(self, key: Any, tokens: torch.Tensor, step: SampledRows) -> None:
        """Learn which tokens were taken."""
        return None

    def outputs(self, key: Any, drawn: Drawn, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Tensors for the host."""
        return ()

    # ------------------------------------------------------------ graphs

    def graph_keys(self, size: int) -> tuple[Any, ...]:
        """Keys for which heads of `size` lines are captured. Each multiplies the number of heads."""
        return ()

    def graph_key(self, key: Any, size: int) -> Any | None:
        """Which of `graph_keys` serves this key, for a head of `size` lines; None: none does."""
        return None

    def versions(self, key: Any) -> tuple[int, ...]:
        """Versions of the tables that such a graph reads."""
        return ()

    def buffers(self, key: Any, size: int) -> tuple[torch.Tensor, ...]:
        """Where a graph finds FeatureUse.inputs: one flat tensor for each array, at least as long."""
        return ()

    def clear(self, key: Any, size: int) -> None:
        """Make the buffers safe to read while a graph is captured."""
        for buffer in self.buffers(key, size):
            buffer.zero_()

    def labels(self, key: Any) -> tuple[str, ...]:
        """Words for statistics: what a head with this key does."""
        return ()


Uses = tuple[tuple[RowFeature, Hashable], ...]  # the features that a head graph runs, with their keys


@dataclass(slots=True)
class HeadWork:
    """One feature's share of a head: what it computes, and its inputs on the device."""

    feature: RowFeature
    key: Any
    inputs: tuple[torch.Tensor, ...] = ()
