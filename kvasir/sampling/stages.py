"""What few rows ask of sampling: stages that change logits, run only in steps in which some row asks.

A stage keeps its rows' parameters in tables on the device that grow on first use; a row that asks holds one line of
them, its slot. The device knows the rows' slots too, so that most stages can be part of a graph. Worker process; knows
rows and logits, neither requests nor text. Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.upload import upload
from kvasir.messages import Extras, NewRow

NEVER = float("-inf")


@dataclass(slots=True)
class SampledRows:
    """The lines of a step that sample."""

    host_rows: NDArray[np.int32]  # [n]; a graph knows none
    rows: torch.Tensor  # [n]
    positions: torch.Tensor  # [n] where each token will stand
    # called with the tokens [n] when the host has them
    learners: list[Callable[[NDArray[np.int32]], None]] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)  # by line: why it cannot go on


class Stage(ABC):
    """One way to change logits. `tables` names the attributes that have a line per slot."""

    narrows = False  # runs after all others, on what is then the distribution to draw from
    capturable = False  # works from the device's tables and slots alone, so that it may be part of a graph
    tables: tuple[str, ...] = ()

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self.version = 0  # of the tables: a graph that has read others must not run again
        self.slots: NDArray[np.int32] = np.full(max_rows, -1, np.int32)  # by row; -1: it does not ask
        self.device_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._told = self.slots.copy()  # what the device knows
        self._free: list[int] = []
        self._size = 0

    def __repr__(self) -> str:
        return type(self).__name__

    # ------------------------------------------------------------ what a stage says

    @abstractmethod
    def asks(self, extras: Extras) -> bool:
        """Whether a row with these wishes needs this stage."""

    @abstractmethod
    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        """Write the parameters of rows that ask into their slots."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        """Change the logits [n, vocabulary], float32, in place."""

    def observe(self, tokens: torch.Tensor, step: SampledRows) -> None:
        """Learn what was drawn, [n] int32. Most stages need not."""
        return None

    # ------------------------------------------------------------ slots

    def open(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:  # noted one by one: should memory run out, what was taken can be given back
            self.slots[new.row] = self.take(new)
        self.fill(new_rows, self.slots[[new.row for new in new_rows]].tolist())

    def take(self, new: NewRow) -> int:
        """A slot for this row."""
        if not self._free:
            added = max(4, self._size)
            grown = [self._grown(getattr(self, name), added) for name in self.tables]  # all of them, or none
            for name, table in zip(self.tables, grown, strict=True):
                setattr(self, name, table)
            self._free = list(range(self._size + added - 1, self._size - 1, -1))
            self._size += added
            self.version += 1
        return self._free.pop()

    def _grown(self, table: torch.Tensor, added: int) -> torch.Tensor:
        more = torch.zeros(added, *table.shape[1:], dtype=table.dtype, device=self.device)
        return torch.cat([table, more])

    def close(self, row: int) -> None:
        """Give the row's slot back. It has none if memory ran out before it was given one."""
        if self.slots[row] >= 0:
            self._free.append(int(self.slots[row]))
            self.slots[row] = -1

    def untold(self) -> NDArray[np.int32]:
        """Rows of which the device does not know their slots yet."""
        return np.flatnonzero(self.slots != self._told).astype(np.int32)

    def tell(self, rows: NDArray[np.int32], on_device: torch.Tensor, slots: torch.Tensor) -> None:
        """`slots` of `rows`, both also on the device."""
        self.device_slots[on_device.long()] = slots
        self._told[rows] = self.slots[rows]

    def holds_any(self, rows: NDArray[np.int32]) -> bool:
        return bool((self.slots[rows] >= 0).any())

    def table(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An empty table with lines of this shape."""
        return torch.zeros(0, *shape, dtype=dtype, device=self.device)

    def upload(self, *arrays: NDArray[np.int32]) -> list[torch.Tensor]:
        return upload(arrays, self.device)

    def lines(self, step: SampledRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Which lines of the step ask, and their slots."""
        held = self.slots[step.host_rows]
        lines = np.flatnonzero(held >= 0)
        at, slots = self.upload(lines.astype(np.int32), held[lines])
        return at.long(), slots.long()

    def widen(self, name: str, width: int, value: float) -> None:
        """Give a table [slots, width, ...] this width, if it has less."""
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
        """Rows get new tenants: forget the old ones' wishes and take in the new ones'."""
        if self._holders:
            for new in new_rows:
                for stage in self._holders.pop(new.row, ()):
                    stage.close(new.row)
        asking = [(new, new.sampling.extras) for new in new_rows if new.sampling.extras is not None]
        for stage in self._stages if asking else ():
            rows = [new for new, extras in asking if stage.asks(extras)]
            for new in rows:  # before it opens, which may run out of memory: the next tenants must close it then
                self._holders.setdefault(new.row, []).append(stage)
            if rows:
                stage.open(rows)
        self._tell_slots()

    def _tell_slots(self) -> None:
        """In one upload. What an upload without memory left untold, the next one tells."""
        changed = [(stage, rows) for stage in self.in_graphs() if len(rows := stage.untold())]
        if not changed:
            return
        told = upload([part for stage, rows in changed for part in (rows, stage.slots[rows])], changed[0][0].device)
        for (stage, rows), on_device, slots in zip(changed, told[::2], told[1::2], strict=True):
            stage.tell(rows, on_device, slots)

    def needed(self, rows: NDArray[np.int32]) -> tuple[Stage, ...]:
        """Those that some of these rows ask for."""
        if not self._holders:
            return ()
        return tuple(stage for stage in self._stages if stage.holds_any(rows))

    def in_graphs(self) -> tuple[Stage, ...]:
        """What a graph runs that needs some stage: all that were ever asked for and may be captured. Lines that do not
        ask cost next to nothing, and a graph for each set of stages would be many graphs."""
        return tuple(stage for stage in self._stages if stage.capturable and stage.version)


def bits(floats: Sequence[float]) -> NDArray[np.int32]:
    """Floats as they travel: by their bits. `view(torch.float32)` on the device makes floats of them again."""
    return np.array(floats, np.float32).view(np.int32)


def mark(table: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, value: bool) -> None:
    """table[slot, id] = value for each pair. Written so because a plain number there would be copied from the host,
    which waits for the device."""
    table.index_put_((slots.long(), ids.long()), torch.full((), value, dtype=table.dtype, device=table.device))


def ragged(
    lists: Sequence[Sequence[int] | NDArray[np.int32]], slots: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lists of numbers end to end, and for each number the slot of its list."""
    lengths = [len(each) for each in lists]
    flat = np.concatenate([np.asarray(each, np.int32) for each in lists]) if lists else np.zeros(0, np.int32)
    return np.repeat(np.array(slots, np.int32), lengths), flat


def room_for(sizes: Iterable[int], width: int) -> int:
    """How wide a table of this width must be for lists of such sizes. Doubled, so that tables are seldom replaced."""
    most = max(sizes)
    return width if most <= width else 1 << (most - 1).bit_length()


def padded(lists: Sequence[Sequence[int]], value: int, width: int) -> NDArray[np.int32]:
    """Lists of numbers as one matrix, so wide."""
    matrix = np.full((len(lists), width), value, np.int32)
    for line, each in enumerate(lists):
        matrix[line, : len(each)] = each
    return matrix
