"""Log-probabilities of sampled tokens and of prompt tokens: two features. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.layout import upload
from kvasir.messages import LOGPROBS, PROMPT_LOGPROBS, Extras, Int32Array, NewRow, Part, StepPlan
from kvasir.sampling.features import (
    NO_COLUMNS,
    Drawn,
    FeatureUse,
    Head,
    HeadLayout,
    HiddenReader,
    RowFeature,
    SampledLines,
    SampledRows,
)
from kvasir.sampling.stages import Stage, Stages, padded, room_for

UNNAMED = -1
MOST_LIKELY = 20  # tokens that graphs score beside the one taken; more are scored without a graph
SCORED_ROWS = 8  # rows of heads that have graphs with scores: these score every row. Larger ones score those that ask


@dataclass(slots=True)
class TopLogprobs:
    token_ids: torch.Tensor  # [lines, 1 + n] int32, the sampled token first
    values: torch.Tensor  # [lines, 1 + n] float32
    ranks: torch.Tensor  # [lines] int32

    def tensors(self) -> list[torch.Tensor]:
        return [self.token_ids, self.values, self.ranks]


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, named: torch.Tensor | None = None, as_logits: bool = False
) -> TopLogprobs:
    """Of logits [lines, vocab]: the tokens' own log-probabilities and ranks, and those of the top `count`.

    `named` [lines, n] int32: tokens to score in place of the likeliest; UNNAMED where there is none.
    """
    logits, tokens = logits.float(), tokens.long()
    count = min(count, logits.shape[-1])
    others = logits.topk(count, dim=-1).indices if count else tokens[:, None][:, :0]
    if named is not None:
        missing = named.shape[1] - others.shape[1]
        if missing > 0:
            others = torch.cat([others, tokens[:, None].expand(-1, missing)], dim=1)
        asked = torch.where(named >= 0, named.long(), others[:, : named.shape[1]])
        others = torch.cat([asked, others[:, named.shape[1] :]], dim=1)
    ids = torch.cat([tokens[:, None], others], dim=1)
    values = logits.gather(1, ids)
    ranks = (logits > values[:, :1]).sum(dim=-1) + 1
    if not as_logits:  # not by logsumexp: a CPU's threads divide its sum over a single line, and not over many
        values = logits.log_softmax(dim=-1).gather(1, ids)
    return TopLogprobs(ids.to(torch.int32), values, ranks.to(torch.int32))


class NamedTokens(Stage):
    """The tokens whose log-probabilities rows ask for by name. Changes no logits."""

    capturable = True
    tables = ("ids",)

    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.ids = self.table(1, dtype=torch.int32)

    def asks(self, extras: Extras) -> bool:
        return bool(extras.logprob_token_ids)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        lists = [extras.logprob_token_ids for new in new_rows if (extras := new.sampling.extras) is not None]
        width = room_for(map(len, lists), self.ids.shape[1])
        self.widen("ids", width, UNNAMED)
        own, ids = self.upload(np.array(slots, np.int32), padded(lists, UNNAMED, width))
        self.ids[own.long()] = ids.view(-1, width)

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        pass

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, n]; some row must have named tokens by now."""
        slots = self.device_slots[rows].long()
        return self.ids[slots.clamp(min=0)].masked_fill((slots < 0)[:, None], UNNAMED)


@dataclass(slots=True, frozen=True)
class ScoreKey:
    lines: int  # that get log-probabilities; in a graph padding included
    likeliest: int  # tokens scored beside the one taken
    named: bool  # some of the rows name tokens to score


@dataclass(slots=True, kw_only=True)
class ScoreUse(FeatureUse):
    index: Int32Array  # which of the lines that sample
    plan_lines: Int32Array  # the same as lines of the plan

    def inputs(self, key: ScoreKey, layout: HeadLayout) -> tuple[Int32Array, ...]:
        places = layout.places(self.index)
        return (np.pad(places, (0, key.lines - len(places))),)

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        ids, values, ranks = arrays
        if not self.key.named:  # a graph scores a few more than anybody wants; rows that name tokens know their number
            ids, values = (each[:, : 1 + self.key.likeliest] for each in (ids, values))
        return Part(self.plan_lines, {"token_ids": ids, "ranks": ranks}, {"values": values})


class TokenScores(RowFeature):
    """Log-probabilities of sampled tokens, of the kind the engine was asked for."""

    part_name = LOGPROBS

    def __init__(self, mode: str, max_rows: int, device: torch.device) -> None:
        self.is_raw = mode.startswith("raw")
        self.as_logits = mode.endswith("logits")
        self.named = NamedTokens(max_rows, device)
        self._named_rows = Stages([self.named])
        self._counts = np.full(max_rows, -1, np.int32)  # by row: likeliest tokens wanted; -1: no scores
        self._lines = torch.zeros(max(max_rows, SCORED_ROWS), dtype=torch.int32, device=device)  # for graphs

    def open(self, new_rows: list[NewRow], rows: torch.Tensor, packed: torch.Tensor) -> None:
        for new in new_rows:
            self._counts[new.row] = -1 if new.sampling.logprobs is None else new.sampling.logprobs
        self._named_rows.open(new_rows)

    def use(self, sampled: SampledLines) -> FeatureUse | None:
        if not sampled.plan.wants_logprobs:
            return None
        counts = self._counts[sampled.rows]
        index = np.flatnonzero(counts >= 0).astype(np.int32)
        if not len(index):
            return None
        likeliest = int(counts.max())
        key = ScoreKey(len(index), likeliest, self.named.holds_any(sampled.rows[index]))
        return ScoreUse(
            key,
            num_entries=len(index),
            index=index,
            plan_lines=sampled.lines[index],
        )

    def outputs(self, key: ScoreKey, drawn: Drawn, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (lines,) = inputs
        logits = drawn.raw if self.is_raw else drawn.processed()
        names = self.named.of(drawn.step.rows[lines]) if key.named else None
        found = top_logprobs(logits[lines], drawn.tokens[lines], key.likeliest, names, self.as_logits)
        return tuple(found.tensors())

    def graph_keys(self, size: int) -> tuple[ScoreKey, ...]:
        return (ScoreKey(size, MOST_LIKELY, named=False),) if size <= SCORED_ROWS else ()

    def graph_key(self, key: ScoreKey, size: int) -> ScoreKey | None:
        fits = size <= SCORED_ROWS and key.likeliest <= MOST_LIKELY and not key.named
        return ScoreKey(size, MOST_LIKELY, named=False) if fits else None

    def buffers(self, key: ScoreKey, size: int) -> tuple[torch.Tensor, ...]:
        return (self._lines[: key.lines],)

    def labels(self, key: ScoreKey) -> tuple[str, ...]:
        return ("scores",)


@dataclass(slots=True)
class Chunk:
    """A stretch of a prompt whose tokens get their log-probabilities in this step."""

    line: int  # of the plan
    first: int  # the step's token that predicts the first token of the stretch
    start: int  # position of the first token of the stretch
    targets: NDArray[np.int32]
    count: int  # likeliest tokens wanted


class PromptScores(RowFeature):
    """Log-probabilities of prompt tokens, computed with the steps that compute the prompt."""

    part_name = PROMPT_LOGPROBS

    def __init__(self, max_lines: int, as_logits: bool, device: torch.device) -> None:
        self.max_lines = max_lines  # lines of logits at once: no more memory than sampling for all rows takes
        self.as_logits = as_logits
        self.device = device
        self._prompts: dict[int, tuple[NDArray[np.int32], int]] = {}  # by row: prompt, likeliest tokens wanted

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        for new in new_rows:
            self._prompts.pop(new.row, None)
            extras = new.sampling.extras
            if extras is not None and extras.prompt_logprobs is not None:
                assert new.token_ids is not None, "a row with extras comes with its tokens"
                self._prompts[new.row] = new.token_ids[: extras.num_prompt_tokens], extras.prompt_logprobs
        return NO_COLUMNS

    def plan_hidden(self, plan: StepPlan) -> HiddenReader | None:
        if not self._prompts:
            return None
        chunks = self._chunks(plan)
        return PromptReader(self, chunks) if chunks else None

    def _chunks(self, plan: StepPlan) -> list[Chunk]:
        """The stretches of prompts that this step computes."""
        found = []
        firsts = np.cumsum(plan.num_tokens) - plan.num_tokens
        for line, row in enumerate(plan.rows.tolist()):
            if row not in self._prompts:
                continue
            prompt, count = self._prompts[row]
            end = int(plan.bounds[line])  # exact: no token of a prompt is still on the device
            start = end - int(plan.num_tokens[line]) + 1
            targets = prompt[start : end + 1]
            if len(targets):
                found.append(Chunk(line, int(firsts[line]), start, targets, count))
            if end + 1 >= len(prompt):
                del self._prompts[row]
        return found


@dataclass(slots=True)
class PromptReader(HiddenReader):
    scores: PromptScores
    chunks: list[Chunk]

    def read(self, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
        """Three tensors (ids, values, ranks) for each chunk."""
        tensors: list[torch.Tensor] = []
        size = self.scores.max_lines
        for chunk in self.chunks:
            (targets,) = upload([chunk.targets], self.scores.device)
            parts = []
            for at in range(0, len(chunk.targets), size):
                some = targets[at : at + size]
                logits = head(hidden[chunk.first + at : chunk.first + at + len(some)])
                parts.append(top_logprobs(logits, some, chunk.count, as_logits=self.scores.as_logits).tensors())
            tensors += [torch.cat(columns) for columns in zip(*parts, strict=True)]
        return tensors

    def part(self, arrays: Sequence[NDArray[Any]]) -> Part:
        """Chunks that want fewer log-probabilities than others are padded."""
        chunks = self.chunks
        lengths, most = [len(chunk.targets) for chunk in chunks], max(chunk.count for chunk in chunks)

        def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate([np.pad(part, ((0, 0), (0, 1 + most - part.shape[1]))) for part in parts])

        positions = [np.arange(c.start, c.start + len(c.targets), dtype=np.int32) for c in chunks]
        return Part(
            index=np.repeat(np.array([chunk.line for chunk in chunks], np.int32), lengths),
            ints={
                "positions": np.concatenate(positions),
                "token_ids": joined(arrays[0::3]),
                "ranks": np.concatenate(arrays[2::3]),
            },
            floats={"values": joined(arrays[1::3])},
        )
