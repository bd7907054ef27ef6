"""What adapters add to a model: the slots of linear layers, and what the running step does with them. Worker process.

An adapter lies in a slot, the same in every layer. A row's slot says which adapter its tokens use; -1: none. The slots
of linear layers have fixed sizes and are read by graphs. Everything else that an adapter may bring (embeddings, a head,
experts, whole matrices, soft prompts) is kept by slot in a dict; steps that need it are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from kvasir import kernels
from kvasir.kernels.layout import AdapterMatrices, TokenSlots
from kvasir.quantization.base import LinearShape


@dataclass(slots=True)
class SoftPrompts:
    """Tokens of a step that stand for a soft prompt."""

    tokens: torch.Tensor  # [n] int64: which of the step's tokens
    embeddings: torch.Tensor | None = None  # [n, hidden], in place of theirs
    kept: torch.Tensor | None = None  # [m] int64: which tokens have keys and values of their own ...
    keys: list[torch.Tensor] = field(default_factory=list)  # ... for each layer [m, kv_heads, head_dim]
    values: list[torch.Tensor] = field(default_factory=list)


class StepAdapters:
    """The adapters of the step that runs now. All layers of a model share one; the runner sets it before each step."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.tokens: TokenSlots | None = None  # None: no token of the step uses an adapter's matrices
        self.last: TokenSlots | None = None  # of each sequence's last token, where a step is reduced to those
        self.lines: TokenSlots | None = None  # of the lines for which logits are computed
        self.wide: frozenset[int] = frozenset()  # slots in this step with more than the slots of linear layers hold
        self.prompts: SoftPrompts | None = None
        self.num_adapted = 0  # steps in which some token used an adapter

    def clear(self) -> None:
        self.tokens = self.last = self.lines = self.prompts = None
        self.wide = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether the step is that of the model alone, so that layers may fuse what they can."""
        return self.tokens is None

    @property
    def needs_layers(self) -> bool:
        """Whether the step must run layer by layer: it does more than products with the slots."""
        return self.prompts is not None or bool(self.wide)

    def of(self, x: torch.Tensor) -> TokenSlots:
        """Return the slots of the lines of x: all tokens of the step, or the last token of each sequence."""
        assert self.tokens is not None, "the step has adapters"
        if len(x) == len(self.tokens.slots):
            return self.tokens
        assert self.last is not None and len(x) == len(self.last.slots), "x has a line for each token or sequence"
        return self.last


class LinearSlots(nn.Module):
    """The adapters' factors for one linear layer, a slot for each adapter: y * gain + shift + expand(shrink(x)). Fused
    matrices have factors of their own for each part. This rank has its share of inputs and outputs, as of the layer."""

    shrink: torch.Tensor  # [slots, parts * rank, inputs]
    expand: torch.Tensor  # [slots, rank, outputs]; scaled
    gain: torch.Tensor  # [slots, outputs] float32
    shift: torch.Tensor  # [slots, outputs] float32
    uses: (
        torch.Tensor
    )  # [slots, 2] int32: the rank, and whether gain and shift do anything; both 0: the layer is not adapted

    def __init__(self, step: StepAdapters, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.step, self.shape = step, shape
        slots, rank, outputs = step.num_slots, step.max_rank, shape.num_own_outputs
        sizes = {
            "shrink": ((slots, len(shape.parts) * rank, shape.num_own_inputs), dtype),
            "expand": ((slots, rank, outputs), dtype),
            "gain": ((slots, outputs), torch.float32),
            "shift": ((slots, outputs), torch.float32),
            "uses": ((slots, 2), torch.int32),
        }
        for name, (size, kind) in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=kind, device=device), persistent=False)
        self.whole: dict[int, list[WholeMatrix]] = {}  # by slot

    def clear(self) -> None:
        for buffer in (self.shrink, self.expand, self.shift, self.uses):
            buffer.zero_()
        self.gain.fill_(1.0)

    def matrices(self) -> AdapterMatrices:
        parts = tuple(part.num_own for part in self.shape.parts)
        return AdapterMatrices(self.shrink, self.expand, self.gain, self.shift, self.uses, parts)

    def apply_to(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Change y [tokens, outputs], the layer's own product with x, by each token's adapter."""
        slots = self.step.of(x)
        y = kernels.adapt(x, y, self.matrices(), slots)
        for slot in self.step.wide:
            for matrix in self.whole.get(slot, ()):
                matrix.replace(x, y, slots)
        return y


@dataclass(slots=True)
class WholeMatrix:
    """A matrix that an adapter brings in place of a part of a layer's."""

    slot: int
    outputs: slice  # of the layer that it computes
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None

    def replace(self, x: torch.Tensor, y: torch.Tensor, slots: TokenSlots) -> None:
        lines = (slots.slots == self.slot).nonzero()[:, 0]
        if len(lines):
            own = nn.functional.linear(x[lines], self.weight, self.bias)
            y[lines[:, None], torch.arange(self.outputs.start, self.outputs.stop, device=y.device)] = own.to(y.dtype)


@dataclass(slots=True)
class VocabularyChange:
    """Change that an adapter makes to an embedding or a head, whole on every rank."""

    weight: torch.Tensor | None = None  # [vocabulary, hidden], in place of the model's
    bias: torch.Tensor | None = None  # [vocabulary] of a head, in place of the model's
    down: torch.Tensor | None = None  # of an embedding [vocabulary, rank], of a head [rank, hidden]
    up: torch.Tensor | None = None  # of an embedding [hidden, rank], of a head [vocabulary, rank]; scaled
    shift: torch.Tensor | None = None  # [vocabulary] of a head


@dataclass(slots=True)
class ExpertsChange:
    """Change that an adapter makes to a layer's experts: for each of this rank's experts the factors of its gate and
    up, and those of its down. None: it changes nothing."""

    # [experts, rank, inputs] and, scaled, [experts, outputs, rank]
    gate_up: tuple[torch.Tensor, torch.Tensor] | None = None
    down: tuple[torch.Tensor, torch.Tensor] | None = None


class ExpertsSlots:
    """The adapters' changes of a layer's experts, by slot."""

    def __init__(self, step: StepAdapters) -> None:
        self.step = step
        self.changes: dict[int, ExpertsChange] = {}

    def changed(self, slots: TokenSlots) -> list[tuple[ExpertsChange, torch.Tensor]]:
        """The changes that the running step needs, each with the lines that need it."""
        found = [(self.changes[slot], slots.slots == slot) for slot in self.step.wide if slot in self.changes]
        return [(change, mask.nonzero()[:, 0]) for change, mask in found]


class VocabularySlots:
    """The adapters' changes of an embedding or a head, by slot."""

    def __init__(self, step: StepAdapters) -> None:
        self.step = step
        self.changes: dict[int, VocabularyChange] = {}

    def lookup(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the vectors of tokens, changed by their adapters."""
        for change, lines in self._changed(self.step.tokens, rows):
            own = rows[lines] if change.weight is None else nn.functional.embedding(ids[lines], change.weight)
            if change.down is not None and change.up is not None:
                own = own + nn.functional.embedding(ids[lines], change.down) @ change.up.T
            rows[lines] = own.to(rows.dtype)
        return rows

    def multiply(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of lines, changed by their adapters."""
        for change, lines in self._changed(self.step.lines, logits):
            states, own = hidden[lines], logits[lines]
            if change.weight is not None:
                own = nn.functional.linear(states, change.weight, change.bias).to(own.dtype)
            elif change.shift is not None:
                own = own + change.shift.to(own.dtype)
            if change.down is not None and change.up is not None:
                own = own + (states @ change.down.T @ change.up.T).to(own.dtype)
            logits[lines] = own
        return logits

    def _changed(self, slots: TokenSlots | None, x: torch.Tensor) -> Sequence[tuple[VocabularyChange, torch.Tensor]]:
        if slots is None or not self.step.wide:
            return ()
        assert len(slots.slots) == len(x), "every line has a slot"
        found = [(self.changes[slot], slots.slots == slot) for slot in self.step.wide if slot in self.changes]
        return [(change, mask.nonzero()[:, 0]) for change, mask in found]
