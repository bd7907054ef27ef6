"""A step's results on their way from the device to the host, read later. Worker process; knows no feature by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import GraphUse, Int32Array, Part, SampleInputs, StepPlan, StepResult, empty_ints
from kvasir.sampling.features import SampledLines, SampledRows
from kvasir.worker.speculative.device import Verified

NOT_NUMBERS = "the model's logits are not numbers (NaN): its weights, or the memory of the device, may be damaged"
MakePart = Callable[[Sequence[NDArray[Any]]], Part]


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
        return StepResult(token_ids, counts, parts, failures=failures or None, graphs=self.graphs, drafts=drafts)

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
    """The part without the entries of drafts that were wrong. Entries of a line stand side by side."""
    number = np.arange(len(part.index)) - np.searchsorted(part.index, part.index)
    own = np.flatnonzero(number < counts[part.index])
    ints = {name: values[own] for name, values in part.ints.items()}
    return Part(part.index[own], ints, {name: values[own] for name, values in part.floats.items()})


def _without(parts: dict[str, Part], dropped: Int32Array) -> dict[str, Part]:
    """The parts without the entries of these lines of the plan."""
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
