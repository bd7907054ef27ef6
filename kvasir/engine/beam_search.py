"""Beam search over log-probabilities: it selects the beams to continue and the finished texts. Core process.

The rules are those of transformers (generation/utils.py, `_beam_search`), so the same model gives the same texts.
Diverse beam search (Vijayakumar et al., 2016) runs one such search per group. A token's log-probability is lowered by
`diversity_penalty` for every beam of an earlier group that takes the same token in the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.messages import BeamSpec


class Proposals(NamedTuple):
    """The likeliest next tokens of one beam, with their log-probabilities, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(slots=True, frozen=True)
class Beam:
    """An unfinished text. `parent` is the index of its parent among the beams of the previous step."""

    parent: int
    tokens: tuple[int, ...]
    score: float  # sum of log-probabilities, less diversity penalties
    logprob: float  # sum of log-probabilities


@dataclass(slots=True, frozen=True)
class FinishedBeam:
    """A finished text."""

    tokens: tuple[int, ...]
    score: float  # with the length penalty
    logprob: float
    stop_token_id: int | None


class GroupSearch:
    """Beam search of one group of `width` beams."""

    def __init__(self, spec: BeamSpec, width: int, max_tokens: int) -> None:
        self.spec = spec
        self.width = width
        self.max_tokens = max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0, 0.0)]
        self.finished: list[FinishedBeam] = []  # best first, at most `width`
        self.done = False
        self._can_improve = True

    def advance(self, proposals: Sequence[Proposals], penalties: Counter[int]) -> None:
        """Take one step. `proposals` are the next tokens of each beam; `penalties` counts the tokens that beams of
        earlier groups take in this step."""
        length = len(self.beams[0].tokens) + 1
        candidates = self._best(proposals, penalties)
        stops = self.spec.eos_token_ids if length < self.max_tokens else None  # None: every beam stops
        running = [beam for beam in candidates if stops is not None and beam.tokens[-1] not in stops]
        # as in transformers, only the best `width` candidates can finish; the others can only continue
        self._finish([beam for beam in candidates[: self.width] if stops is None or beam.tokens[-1] in stops])
        self.beams = running[: self.width]
        if self.beams:
            self._can_improve &= self._can_beat_worst(length)
        full = len(self.finished) == self.width and self.spec.early_stopping is True
        self.done = not self.beams or not self._can_improve or full
        if self.done:
            self.beams = []

    def _best(self, proposals: Sequence[Proposals], penalties: Counter[int]) -> list[Beam]:
        """Return the best continuations: enough to continue with `width` beams even if others stop."""
        count = candidates_per_beam(self.spec.eos_token_ids, self.width)
        found = [
            Beam(
                beam.parent,
                (*beam.tokens, token),
                beam.score + logprob - self.spec.diversity_penalty * penalties[token],
                beam.logprob + logprob,
            )
            for beam, proposed in zip(self.beams, proposals, strict=True)
            for token, logprob in zip(*proposed, strict=True)
        ]
        return sorted(found, key=lambda beam: -beam.score)[:count]

    def _finish(self, beams: list[Beam]) -> None:
        if not self._can_improve or (len(self.finished) == self.width and self.spec.early_stopping is True):
            return
        for beam in beams:
            last = beam.tokens[-1]
            score = beam.score / len(beam.tokens) ** self.spec.length_penalty
            stop = last if last in self.spec.eos_token_ids else None
            self.finished.append(FinishedBeam(beam.tokens, score, beam.logprob, stop))
        self.finished = sorted(self.finished, key=lambda text: -text.score)[: self.width]

    def _can_beat_worst(self, length: int) -> bool:
        if len(self.finished) < self.width:
            return True
        spec = self.spec
        longest = self.max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else length
        best: float = self.beams[0].score / longest**spec.length_penalty
        return best > self.finished[-1].score


class BeamSearch:
    """The beam search of one request, with all its groups."""

    def __init__(self, spec: BeamSpec, max_tokens: int) -> None:
        self.spec = spec
        width = spec.width // spec.num_groups
        self.groups = [GroupSearch(spec, width, max_tokens) for _ in range(spec.num_groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, proposals: Sequence[Proposals]) -> list[Beam]:
        """Take one step and return the beams of all groups to continue with. `parent` is an index into the list that
        the last call returned."""
        taken: Counter[int] = Counter()
        beams: list[Beam] = []
        for group in self.groups:
            if group.done:
                continue
            group.advance([proposals[beam.parent] for beam in group.beams], taken)
            taken.update(beam.tokens[-1] for beam in group.beams)
            found, start = group.beams, len(beams)
            beams += found
            # in the next step, `parent` is an index into the list returned here
            group.beams = [Beam(start + i, b.tokens, b.score, b.logprob) for i, b in enumerate(found)]
        return beams

    def finished(self) -> list[FinishedBeam]:
        """Return all finished texts, best first."""
        return sorted((text for group in self.groups for text in group.finished), key=lambda text: -text.score)

    def best(self) -> tuple[tuple[int, ...], int]:
        """Return the best text so far, and how many of its first tokens all other texts share."""
        texts = [(text.score, text.tokens) for group in self.groups for text in group.finished]
        penalty = self.spec.length_penalty
        texts += [(b.score / len(b.tokens) ** penalty, b.tokens) for group in self.groups for b in group.beams]
        best = max(texts)[1]
        agreed = len(best)
        for _, tokens in texts:
            same = zip(best[:agreed], tokens, strict=False)
            agreed = next((i for i, (a, b) in enumerate(same) if a != b), min(agreed, len(tokens)))
        return best, agreed


def candidates_per_beam(eos_token_ids: Sequence[int], width: int) -> int:
    """Number of continuations of which at least `width` do not stop, whatever tokens they end with."""
    return max(2, 1 + len(eos_token_ids)) * width
