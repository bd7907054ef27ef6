"""Stop strings and repetition detection: conditions that end a request and that the engine does not check. API process.

The first stop string is the one that ends first, so the result does not depend on how the text was split into pieces.
If two end at the same place, the longer one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.sampling_params import RepetitionDetectionParams


class StopStrings:
    """Finds stop strings in the text of one request and keeps back text that may be the beginning of one."""

    __slots__ = ("_include", "_longest", "_pending", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0])
        self._prefixes = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._include = include_in_output
        self._pending = ""  # end of the text that may be the beginning of a stop string

    def feed(self, piece: str, search: bool = True) -> tuple[str, str | None]:
        """Add a piece of text. Returns the text that can be shown now, and the stop string that was found.

        With search=False no stop string can end in this piece, but one may begin in it.
        """
        text = self._pending + piece
        if search and piece:
            found = self._find(text)
            if found is not None:
                stop, end = found
                return text[: end if self._include else end - len(stop)], stop
        held = self._partial_stop(text)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """Returns the text kept back, when the request has ended for another reason."""
        held, self._pending = self._pending, ""
        return held

    def _find(self, text: str) -> tuple[str, int] | None:
        """The stop string that ends first in the new text, and the position of its end."""
        best: tuple[str, int] | None = None
        for stop in self._stops:  # longest first
            at = text.find(stop, max(0, len(self._pending) - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = stop, at + len(stop)
        return best

    def _partial_stop(self, text: str) -> int:
        """Number of characters at the end of the text that are the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class Repetitions:
    """Detects a pattern of tokens that is repeated at the end of a request's output.

    A pattern of length n has occurred k times if each of the last n * (k - 1) tokens equals the one n places before it.
    The length of that run is kept for each n, so a token costs one comparison per n.
    """

    __slots__ = ("_run_lengths", "_runs", "_tokens")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
        self._run_lengths = {size: size * (params.min_count - 1) for size in sizes}
        self._runs = dict.fromkeys(sizes, 0)
        self._tokens: list[int] = []

    def feed(self, token: int) -> bool:
        """Add a token. Returns whether a pattern has now occurred min_count times."""
        tokens = self._tokens
        found = False
        for size, length in self._run_lengths.items():
            same = len(tokens) >= size and tokens[-size] == token
            self._runs[size] = self._runs[size] + 1 if same else 0
            found |= self._runs[size] >= length
        tokens.append(token)
        return found
