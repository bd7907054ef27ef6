"""Log-probabilities as callers get them: a list of dicts, or one flat object. API process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvasir.messages import Part
from kvasir.outputs import FlatLogprobs, Logprob


class LogprobLine(NamedTuple):
    """Log-probabilities at one position, the token itself first."""

    token_ids: list[int]
    values: list[float]
    rank: int  # of the token itself
    position: int = 0  # of a prompt token


TokenText = Callable[[int], str | None]
Entry = tuple[int, float, int | None, str | None]


def by_line(part: Part) -> dict[int, list[LogprobLine]]:
    """A step's log-probabilities by their line of the output, in token order."""
    lines: dict[int, list[LogprobLine]] = {}
    ints = part.ints
    arrays = (ints["token_ids"], part.floats["values"], ints["ranks"], ints.get("positions", ints["ranks"]))
    for line, *entry in zip(part.index.tolist(), *(array.tolist() for array in arrays), strict=True):
        lines.setdefault(line, []).append(LogprobLine(*entry))
    return lines


class LogprobLists:
    """One entry per position, with `count` tokens besides the token itself; `named`: not the likeliest."""

    __slots__ = ("count", "entries", "named")

    def __init__(self, count: int, named: bool = False, flat: bool = False) -> None:
        self.count = count
        self.named = named
        self.entries: list[dict[int, Logprob]] | FlatLogprobs = FlatLogprobs() if flat else []

    def __len__(self) -> int:
        return len(self.entries)

    def take(self) -> list[dict[int, Logprob]] | FlatLogprobs:
        """Return the entries, and keep them no longer."""
        taken = self.entries
        self.entries = FlatLogprobs() if isinstance(taken, FlatLogprobs) else []
        return taken

    @property
    def num_values(self) -> int:
        """Approximate number of log-probabilities that are kept."""
        return len(self.entries) * (1 + self.count)

    def add_nothing(self) -> None:
        """Add a position without log-probabilities: a prompt's first token."""
        self.entries.append(None)  # type: ignore[arg-type]  # only prompts have such positions

    def add(self, line: LogprobLine, text: TokenText) -> None:
        if isinstance(self.entries, FlatLogprobs):
            self.entries.append(self._entries(line, text))
        else:
            self.entries.append({entry[0]: Logprob(*entry[1:]) for entry in self._entries(line, text)})

    def _entries(self, line: LogprobLine, text: TokenText) -> Iterator[Entry]:
        ids, values, rank, _ = line
        yield ids[0], values[0], rank, text(ids[0])
        for place in range(1, 1 + self.count):
            if ids[place] != ids[0]:
                yield ids[place], values[place], None if self.named else place, text(ids[place])
