"""Vectors in place of tokens: the feature of rows that pool hidden states and sample nothing. Worker process.

A pooler reads the hidden states of each step that computes a part of a prompt. What it needs of earlier parts is
carried from step to step, one line per row: the sum for a mean, the largest values, or the first token's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.layout import upload
from kvasir.messages import Int32Array, NewRow, Part, RowPooling, StepPlan
from kvasir.sampling.features import NO_COLUMNS, Head, HiddenReader, RowFeature


class PoolingSettings(Protocol):
    """What this module reads of a config.pooling.PoolerSpec."""

    @property
    def task(self) -> str: ...

    @property
    def pooling(self) -> str: ...

    @property
    def num_skipped(self) -> int: ...


class PoolingHead(Protocol):
    """The head of one task; see layers/pooler.py."""

    @property
    def spec(self) -> PoolingSettings: ...

    def __call__(self, x: torch.Tensor, activate: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(slots=True)
class PromptPiece:
    """What a step computes of one prompt."""

    line: int  # of the plan
    row: int
    first: int  # the step's token with which it begins ...
    count: int  # ... and the number of its tokens
    start: int  # position of the first of them in the prompt
    is_last: bool
    asked: RowPooling


class PooledRows(RowFeature):
    """The rows that ask for one task."""

    def __init__(self, pooler: PoolingHead, max_rows: int, device: torch.device) -> None:
        self.pooler, self.device, self.max_rows = pooler, device, max_rows
        self.part_name = pooler.spec.task
        self.is_per_token = pooler.spec.pooling in ("all", "step")
        self._asked: dict[int, RowPooling] = {}
        self._carried: torch.Tensor | None = (
            None  # [rows, hidden] float32; made when a prompt is first computed in parts
        )

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        for new in new_rows:
            self._asked.pop(new.row, None)
            if new.pooling is not None and new.pooling.task == self.part_name:
                self._asked[new.row] = new.pooling
        return NO_COLUMNS

    def plan_hidden(self, plan: StepPlan) -> HiddenReader | None:
        if not self._asked:
            return None
        firsts = (np.cumsum(plan.num_tokens) - plan.num_tokens).tolist()
        counts, ends = plan.num_tokens.tolist(), plan.bounds.tolist()  # bounds are exact: nothing is sampled
        pieces = []
        for line, row in enumerate(plan.rows.tolist()):
            if (asked := self._asked.get(row)) is None:
                continue
            is_last = ends[line] >= asked.num_tokens
            start = ends[line] - counts[line]
            pieces.append(PromptPiece(line, row, firsts[line], counts[line], start, is_last, asked))
            if is_last:
                del self._asked[row]
        if not pieces:
            return None
        return PooledTokenReader(self, pieces) if self.is_per_token else PooledPromptReader(self, pieces)

    def carried(self, size: int) -> torch.Tensor:
        if self._carried is None:
            self._carried = torch.zeros(self.max_rows, size, dtype=torch.float32, device=self.device)
        return self._carried


def _flags(pieces: list[PromptPiece], device: torch.device) -> torch.Tensor | None:
    """Return whether each piece wants the pooler's last function, [pieces]; None if all do."""
    wanted = [piece.asked.activate for piece in pieces]
    if all(wanted):
        return None
    (flags,) = upload([np.array(wanted, np.int32)], device)
    return flags.bool()


@dataclass(slots=True)
class PooledPromptReader(HiddenReader):
    """One vector for each prompt that a step completes."""

    rows: PooledRows
    pieces: list[PromptPiece]

    def read(self, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
        rows = self.rows
        done = [piece for piece in self.pieces if piece.is_last]
        pooled = self._pool(hidden)
        if pooled is None:
            return [torch.zeros(0, 1, dtype=torch.float32, device=rows.device)]
        return [rows.pooler(pooled, _flags(done, rows.device))]

    def _pool(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[prompts, hidden] float32 of the prompts that are complete; None: none is."""
        device, pooling = self.rows.device, self.rows.pooler.spec.pooling
        columns = [(p.first, p.count, p.row, p.start, p.is_last, p.first + p.count - 1) for p in self.pieces]
        table = np.array(columns, np.int32).T
        if pooling == "last":
            ends = table[5][table[4] > 0]
            return hidden[upload([ends], device)[0].long()].float() if len(ends) else None
        whole = not table[3].any() and bool(table[4].all())
        if whole and pooling == "cls":
            return hidden[upload([table[0]], device)[0].long()].float()
        first, count, row, start = (each.long() for each in upload(list(table[:4]), device))
        is_cls = pooling == "cls"
        found = hidden[first].float() if is_cls else self._reduce(hidden, table[0], table[1], count, pooling)
        if not whole:
            found = self._carry(found, row, start, pooling)
            chosen = np.flatnonzero(table[4]).astype(np.int32)
            if not len(chosen):
                return None
            (lines,) = upload([chosen], device)
            found, count, start = found[lines.long()], count[lines.long()], start[lines.long()]
        return found / (start + count)[:, None] if pooling == "mean" else found

    def _reduce(
        self, hidden: torch.Tensor, first: Int32Array, counts: Int32Array, lengths: torch.Tensor, pooling: str
    ) -> torch.Tensor:
        """Return the sums, or the largest values, of the tokens of each piece."""
        if int(counts.sum()) != len(hidden):  # other rows of the step ask for something else
            own = np.concatenate([np.arange(f, f + c) for f, c in zip(first.tolist(), counts.tolist(), strict=True)])
            hidden = hidden[upload([own.astype(np.int32)], self.rows.device)[0].long()]
        kind = "sum" if pooling == "mean" else "max"
        return torch.segment_reduce(hidden.float(), kind, lengths=lengths, axis=0, unsafe=True)

    def _carry(self, found: torch.Tensor, row: torch.Tensor, start: torch.Tensor, pooling: str) -> torch.Tensor:
        """Join what earlier steps have found for the same prompts, and keep the result for later ones."""
        carried = self.rows.carried(found.shape[1])
        before, is_first = carried[row], (start == 0)[:, None]
        if pooling == "mean":
            found = torch.where(is_first, found, before + found)
        elif pooling == "max":
            found = torch.where(is_first, found, torch.maximum(before, found))
        else:
            found = torch.where(is_first, found, before)
        carried[row] = found
        return found

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        done = [piece.line for piece in self.pieces if piece.is_last]
        return Part(np.array(done, np.int32), {}, {"values": arrays[0]})


@dataclass(slots=True)
class PooledTokenReader(HiddenReader):
    """A vector for each token that a step computes."""

    rows: PooledRows
    pieces: list[PromptPiece]

    def _spans(self) -> list[tuple[PromptPiece, int, int]]:
        """The tokens of each piece that have a vector: those from one token of the step to another."""
        skipped = self.rows.pooler.spec.num_skipped
        return [(p, p.first + min(p.count, max(0, skipped - p.start)), p.first + p.count) for p in self.pieces]

    def read(self, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
        spans = self._spans()
        own = torch.cat([hidden[begin:end] for _, begin, end in spans]).float()
        flags = _flags([piece for piece, _, _ in spans], self.rows.device)
        if flags is not None:
            (counts,) = upload([np.array([end - begin for _, begin, end in spans], np.int32)], self.rows.device)
            flags = torch.repeat_interleave(flags, counts.long(), output_size=len(own))
        return [self.rows.pooler(own, flags)]

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        spans = self._spans()
        index = np.repeat([p.line for p, _, _ in spans], [end - begin for _, begin, end in spans]).astype(np.int32)
        positions = [np.arange(begin, end) - p.first + p.start for p, begin, end in spans]
        return Part(index, {"positions": np.concatenate(positions).astype(np.int32)}, {"values": arrays[0]})
