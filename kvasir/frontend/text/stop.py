"""What ends a request besides its tokens' own meaning. API process.

Stop strings: finds the first in text that comes piece by piece, and holds back what might be its beginning. "First" is
the one whose end comes first, so the answer does not depend on how the text was cut into pieces. Of two that end
together the longer one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.config.checks import RepetitionDetectionParams


class StopStrings:
    """Looks for stop strings in one request's text."""

    __slots__ = ("_beginnings", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0])
        self._beginnings = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._include = include_in_output
        self._held = ""  # the end of the text, which may be the beginning of a stop string

    def feed(self, piece: str, search: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text; return what may be shown of all so far, and the stop string found in it.

        Without `search` no stop string ends in this piece, but a later one may still begin in it.
        """
        text = self._held + piece
        if search and piece:
            found = self._find(text)
            if found is not None:
                stop, end = found
                return text[: end if self._include else end - len(stop)], stop
        held = self._beginning_at_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, when the request has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[str, int] | None:
        """The stop string that ends first behind what was held, and where it ends."""
        best: tuple[str, int] | None = None
        for stop in self._stops:  # longest first
            at = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = stop, at + len(stop)
        return best

    def _beginning_at_end(self, text: str) -> int:
        """How many characters at the end of the text begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class Repetitions:
    """Notices when a request's tokens end with one pattern several times in a row.

    A pattern of length n has stood k times when the last n * (k - 1) tokens equal those n places earlier; that run is
    kept per length, so that a token costs one comparison for each length.
    """

    __slots__ = ("_goals", "_runs", "_tokens")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
        self._goals = {size: size * (params.min_count - 1) for size in sizes}
        self._runs = dict.fromkeys(sizes, 0)
        self._tokens: list[int] = []

    def feed(self, token: int) -> bool:
        """Take the next token; whether a pattern has now been repeated often enough."""
        tokens = self._tokens
        found = False
        for size, goal in self._goals.items():
            same = len(tokens) >= size and tokens[-size] == token
            self._runs[size] = self._runs[size] + 1 if same else 0
            found |= self._runs[size] >= goal
        tokens.append(token)
        return found
