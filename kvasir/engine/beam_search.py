"""Beam search over log-probabilities: which texts to go on with, which are done. Core process; numbers only.

The rules are transformers' (generation/utils.py, `_beam_search`), so that the same model gives the same texts. Diverse
search (Vijayakumar et al., 2016) runs one such search per group; a group's log-probabilities are lowered by
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
    """A text on its way. `parent` is its place among the beams of the step before."""

    parent: int
    tokens: tuple[int, ...]
    score: float  # sum of log-probabilities, less diversity penalties
    logprob: float  # sum of log-probabilities


@dataclass(slots=True, frozen=True)
class Text:
    """A text that is done."""

    tokens: tuple[int, ...]
    score: float  # with the length penalty
    logprob: float
    stop_token_id: int | None


class Group:
    """One beam search of `width` beams."""

    def __init__(self, spec: BeamSpec, width: int, max_tokens: int) -> None:
        self.spec = spec
        self.width = width
        self.max_tokens = max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0, 0.0)]
        self.texts: list[Text] = []  # best first, at most `width`
        self.done = False
        self._can_improve = True

    def advance(self, proposals: Sequence[Proposals], penalties: Counter[int]) -> None:
        """One step: `proposals` of each of the step's beams, which `parent` of ours counts."""
        length = len(self.beams[0].tokens) + 1
        candidates = self._best(proposals, penalties)
        stops = self.spec.eos_token_ids if length < self.max_tokens else None  # None: every one stops
        running = [beam for beam in candidates if stops is not None and beam.tokens[-1] not in stops]
        # transformers' rule: what stops counts only among the best `width`; the others are there to go on with
        self._finish([beam for beam in candidates[: self.width] if stops is None or beam.tokens[-1] in stops])
        self.beams = running[: self.width]
        if self.beams:
            self._can_improve &= self._may_beat_the_worst(length)
        full = len(self.texts) == self.width and self.spec.early_stopping is True
        self.done = not self.beams or not self._can_improve or full
        if self.done:
            self.beams = []

    def _best(self, proposals: Sequence[Proposals], penalties: Counter[int]) -> list[Beam]:
        """The best continuations: as many as are enough to go on whatever stops."""
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
        if not self._can_improve or (len(self.texts) == self.width and self.spec.early_stopping is True):
            return
        for beam in beams:
            last = beam.tokens[-1]
            score = beam.score / len(beam.tokens) ** self.spec.length_penalty
            stop = last if last in self.spec.eos_token_ids else None
            self.texts.append(Text(beam.tokens, score, beam.logprob, stop))
        self.texts = sorted(self.texts, key=lambda text: -text.score)[: self.width]

    def _may_beat_the_worst(self, length: int) -> bool:
        if len(self.texts) < self.width:
            return True
        spec = self.spec
        longest = self.max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else length
        best: float = self.beams[0].score / longest**spec.length_penalty
        return best > self.texts[-1].score


class BeamSearch:
    """All groups of one request."""

    def __init__(self, spec: BeamSpec, max_tokens: int) -> None:
        self.spec = spec
        width = spec.width // spec.num_groups
        self.groups = [Group(spec, width, max_tokens) for _ in range(spec.num_groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def advance(self, proposals: Sequence[Proposals]) -> list[Beam]:
        """The beams to go on with, of all groups; `parent` is a place in the list that the last call returned."""
        taken: Counter[int] = Counter()
        beams: list[Beam] = []
        for group in self.groups:
            if group.done:
                continue
            group.advance([proposals[beam.parent] for beam in group.beams], taken)
            taken.update(beam.tokens[-1] for beam in group.beams)
            found, start = group.beams, len(beams)
            beams += found
            # from now on `parent` is the place in what we return
            group.beams = [Beam(start + i, b.tokens, b.score, b.logprob) for i, b in enumerate(found)]
        return beams

    def texts(self) -> list[Text]:
        """What was found, best first."""
        return sorted((text for group in self.groups for text in group.texts), key=lambda text: -text.score)

    def best(self) -> tuple[tuple[int, ...], int]:
        """The best text so far, and how many of its tokens all that may still win agree upon."""
        texts = [(text.score, text.tokens) for group in self.groups for text in group.texts]
        penalty = self.spec.length_penalty
        texts += [(b.score / len(b.tokens) ** penalty, b.tokens) for group in self.groups for b in group.beams]
        best = max(texts)[1]
        agreed = len(best)
        for _, tokens in texts:
            same = zip(best[:agreed], tokens, strict=False)
            agreed = next((i for i, (a, b) in enumerate(same) if a != b), min(agreed, len(tokens)))
        return best, agreed


def candidates_per_beam(eos_token_ids: Sequence[int], width: int) -> int:
    """With so many continuations, `width` of them go on even if all beams may stop."""
    return max(2, 1 + len(eos_token_ids)) * width
