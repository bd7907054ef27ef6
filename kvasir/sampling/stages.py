"""Stages of the sampler: rules that change logits. A stage runs only in steps in which some row asks for it.

A stage keeps its rows' parameters in tables on the device, which grow on first use; a row that asks holds one line of
them, its slot. The device has the rows' slots too, so that most stages can be part of a graph. Worker process; knows
rows and logits, neither requests nor text. Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.layout import upload
from kvasir.messages import Extras, NewRow
from kvasir.sampling.features import SampledRows

FORBIDDEN = float("-inf")  # the logit of a token that must not be drawn


class Stage(ABC):
    """A rule that changes logits. `tables` names the attributes that have a line per slot."""

    narrows = False  # it runs after the other stages and masks, because it looks at the distribution to draw from
    capturable = False  # it reads only tables and slots on the device, so it may be part of a graph
    tables: tuple[str, ...] = ()

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self.version = 0  # of the tables: a graph that was captured with older ones must not run again
        self.slots: NDArray[np.int32] = np.full(max_rows, -1, np.int32)  # by row; -1: it does not ask
        self.device_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._uploaded = self.slots.copy()  # the slots as the device has them
        self._free: list[int] = []
        self._size = 0

    def __repr__(self) -> str:
        return type(self).__name__

    # ------------------------------------------------------------ what a stage defines

    @abstractmethod
    def asks(self, extras: Extras) -> bool:
        """Whether a row with these extras needs this stage."""

    @abstractmethod
    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        """Write the parameters of rows that ask into their slots."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        """Change the logits [n, vocabulary], float32, in place."""

    def observe(self, tokens: torch.Tensor, step: SampledRows) -> None:
        """Update tables with the tokens that were taken, [n] int32. Most stages keep no history."""
        return None

    # ------------------------------------------------------------ slots

    def open(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:  # set one by one, so that slots are not lost if memory runs out halfway
            self.slots[new.row] = self.take(new)
        self.fill(new_rows, self.slots[[new.row for new in new_rows]].tolist())

    def take(self, new: NewRow) -> int:
        """Take a free slot for this row; tables grow when there is none."""
        if not self._free:
            self._grow(max(4, self._size))
        return self._free.pop()

    def reserve(self) -> None:
        """Take tables for all rows. Stages with lists reserve their usual width, too."""
        self._grow(len(self.slots) - self._size)

    def _grow(self, added: int) -> None:
        grown = [self._grown(getattr(self, name), added) for name in self.tables]  # all tables grow, or none
        for name, table in zip(self.tables, grown, strict=True):
            setattr(self, name, table)
        self._free += range(self._size + added - 1, self._size - 1, -1)
        self._size += added
        self.version += 1

    def _grown(self, table: torch.Tensor, added: int) -> torch.Tensor:
        more = torch.zeros(added, *table.shape[1:], dtype=table.dtype, device=self.device)
        return torch.cat([table, more])

    def close(self, row: int) -> None:
        """Free the row's slot. It has none if memory ran out before it got one."""
        if self.slots[row] >= 0:
            self._free.append(int(self.slots[row]))
            self.slots[row] = -1

    def changed_rows(self) -> NDArray[np.int32]:
        """Rows whose slots the device does not have yet."""
        return np.flatnonzero(self.slots != self._uploaded).astype(np.int32)

    def set_device_slots(self, rows: NDArray[np.int32], on_device: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the slots of `rows`; `on_device` are the same rows on the device."""
        self.device_slots[on_device.long()] = slots
        self._uploaded[rows] = self.slots[rows]

    def holds_any(self, rows: NDArray[np.int32]) -> bool:
        return bool((self.slots[rows] >= 0).any())

    def table(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An empty table with lines of this shape."""
        return torch.zeros(0, *shape, dtype=dtype, device=self.device)

    def upload(self, *arrays: NDArray[np.int32]) -> list[torch.Tensor]:
        return upload(arrays, self.device)

    def lines(self, step: SampledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """The lines of the step that ask, and their slots."""
        held = self.slots[step.host_rows]
        lines = np.flatnonzero(held >= 0)
        at, slots = self.upload(lines.astype(np.int32), held[lines])
        return at.long(), slots.long()

    def widen(self, name: str, width: int, value: float) -> None:
        """Widen a table [slots, width, ...] to this width, if it is narrower."""
        table: torch.Tensor = getattr(self, name)
        missing = width - table.shape[1]
        if missing > 0:
            shape = (table.shape[0], missing, *table.shape[2:])
            more = torch.full(shape, value, dtype=table.dtype, device=self.device)
            setattr(self, name, torch.cat([table, more], dim=1))
            self.version += 1


class Stages:
    """All stages, in the order in which they run."""

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        self._stages = tuple(stages)
        self._holders: dict[int, list[Stage]] = {}  # by row

    def open(self, new_rows: list[NewRow]) -> None:
        """New requests take these rows: free the slots of the former ones and fill those of the new ones."""
        if self._holders:
            for new in new_rows:
                for stage in self._holders.pop(new.row, ()):
                    stage.close(new.row)
        asking = [(new, new.sampling.extras) for new in new_rows if new.sampling.extras is not None]
        for stage in self._stages if asking else ():
            rows = [new for new, extras in asking if stage.asks(extras)]
            for new in rows:  # before `open`, which may run out of memory: the row's next request frees the slot then
                self._holders.setdefault(new.row, []).append(stage)
            if rows:
                stage.open(rows)
        self._upload_slots()

    def _upload_slots(self) -> None:
        """Send changed slots in one upload. If it fails for want of memory, the next one sends them."""
        changed = [(stage, rows) for stage in self.in_graphs() if stage.version and len(rows := stage.changed_rows())]
        if not changed:
            return
        sent = upload([part for stage, rows in changed for part in (rows, stage.slots[rows])], changed[0][0].device)
        for (stage, rows), on_device, slots in zip(changed, sent[::2], sent[1::2], strict=True):
            stage.set_device_slots(rows, on_device, slots)

    def needed(self, rows: NDArray[np.int32]) -> tuple[Stage, ...]:
        """The stages that some of these rows ask for."""
        if not self._holders:
            return ()
        return tuple(stage for stage in self._stages if stage.holds_any(rows))

    def in_graphs(self) -> tuple[Stage, ...]:
        """The stages of a graph that needs any: all that may be captured. Lines that do not ask cost next to nothing,
        and a graph for each set of stages would be many graphs."""
        return tuple(stage for stage in self._stages if stage.capturable)

    def reserve(self) -> None:
        for stage in self.in_graphs():
            stage.reserve()


def bits(floats: Sequence[float]) -> NDArray[np.int32]:
    """Floats as int32 of the same bits, for an upload. `view(torch.float32)` on the device turns them back."""
    return np.array(floats, np.float32).view(np.int32)


def mark(table: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, value: bool) -> None:
    """table[slot, id] = value for each pair. Assigning a plain number would copy it from the host, and wait."""
    table.index_put_((slots.long(), ids.long()), torch.full((), value, dtype=table.dtype, device=table.device))


def ragged(
    lists: Sequence[Sequence[int] | NDArray[np.int32]], slots: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lists of numbers end to end, and for each number the slot of its list."""
    lengths = [len(each) for each in lists]
    flat = np.concatenate([np.asarray(each, np.int32) for each in lists]) if lists else np.zeros(0, np.int32)
    return np.repeat(np.array(slots, np.int32), lengths), flat


def room_for(sizes: Iterable[int], width: int) -> int:
    """The width that a table needs for lists of such sizes. Widths are powers of two, so that tables seldom grow."""
    most = max(sizes)
    return width if most <= width else 1 << (most - 1).bit_length()


def padded(lists: Sequence[Sequence[int]], value: int, width: int) -> NDArray[np.int32]:
    """Lists of numbers as one matrix of this width."""
    matrix = np.full((len(lists), width), value, np.int32)
    for line, each in enumerate(lists):
        matrix[line, : len(each)] = each
    return matrix
