"""Log-probabilities as callers get them: a list of dicts, or one flat object. API process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvasir.messages import Logprobs, PromptLogprobs
from kvasir.outputs import FlatLogprobs, Logprob

# One token's line of a step's logprobs: ids and values, the token's own first, and the token's own rank.
LogprobLine = tuple[list[int], list[float], int]
TokenText = Callable[[int], str | None]
Entry = tuple[int, float, int | None, str | None]


def by_line(logprobs: Logprobs | None) -> dict[int, list[LogprobLine]]:
    """A step's logprobs by the line of tokens they belong to, in token order."""
    lines: dict[int, list[LogprobLine]] = {}
    if logprobs is not None:
        arrays = (logprobs.index, logprobs.token_ids, logprobs.values, logprobs.ranks)
        for line, ids, values, rank in zip(*(array.tolist() for array in arrays), strict=True):
            lines.setdefault(line, []).append((ids, values, rank))
    return lines


def lines_of(part: PromptLogprobs) -> list[LogprobLine]:
    return list(zip(part.token_ids.tolist(), part.values.tolist(), part.ranks.tolist(), strict=True))


class LogprobLists:
    """Grows by one position per token, with `count` tokens beside the token itself; `named`: not the likeliest."""

    __slots__ = ("count", "entries", "named")

    def __init__(self, count: int, named: bool = False, flat: bool = False) -> None:
        self.count = count
        self.named = named
        self.entries: list[dict[int, Logprob]] | FlatLogprobs = FlatLogprobs() if flat else []

    def __len__(self) -> int:
        return len(self.entries)

    def add_nothing(self) -> None:
        """A position without a prediction: a prompt's first token."""
        self.entries.append(None)  # type: ignore[arg-type]  # only lists of prompts have such

    def add(self, line: LogprobLine, text: TokenText) -> None:
        if isinstance(self.entries, FlatLogprobs):
            self.entries.append(self._entries(line, text))
        else:
            self.entries.append({entry[0]: Logprob(*entry[1:]) for entry in self._entries(line, text)})

    def _entries(self, line: LogprobLine, text: TokenText) -> Iterator[Entry]:
        ids, values, rank = line
        yield ids[0], values[0], rank, text(ids[0])
        for place in range(1, 1 + self.count):
            if ids[place] != ids[0]:
                yield ids[place], values[place], None if self.named else place, text(ids[place])
