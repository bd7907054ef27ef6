"""Log-probabilities of sampled tokens and of prompt tokens, on the device. Nothing here waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.upload import upload
from kvasir.messages import Extras, NewRow, Part, StepPlan
from kvasir.sampling.stages import SampledRows, Stage, Stages, padded, room_for

UNNAMED = -1


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

    `named` [lines, n] int32: tokens asked for in place of the likeliest; UNNAMED where none is.
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
    if not as_logits:
        values = values - logits.logsumexp(dim=-1, keepdim=True)
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


class TokenScores:
    """Log-probabilities of sampled tokens, of the kind the engine was asked for."""

    def __init__(self, mode: str, max_rows: int, device: torch.device) -> None:
        self.is_raw = mode.startswith("raw")
        self.as_logits = mode.endswith("logits")
        self.named = NamedTokens(max_rows, device)
        self._rows = Stages([self.named])

    def open(self, new_rows: list[NewRow]) -> None:
        self._rows.open(new_rows)

    def score(
        self,
        raw: torch.Tensor,  # [n, vocabulary]
        processed: Callable[[], torch.Tensor],
        tokens: torch.Tensor,  # [n]
        rows: torch.Tensor,  # [n]
        lines: torch.Tensor,  # [m] int32: which of them to score
        count: int,  # likeliest tokens wanted
        named: bool,  # whether some line's row names tokens
    ) -> TopLogprobs:
        logits = raw if self.is_raw else processed()
        names = self.named.of(rows[lines]) if named else None
        return top_logprobs(logits[lines], tokens[lines], count, names, self.as_logits)


@dataclass(slots=True)
class Chunk:
    """A stretch of a prompt whose tokens get their log-probabilities in this step."""

    line: int  # of the plan
    first: int  # of the step's tokens, the one that predicts the first of the stretch
    start: int  # position of the first of the stretch
    targets: NDArray[np.int32]
    count: int  # likeliest tokens wanted


class PromptScores:
    """Log-probabilities of prompt tokens, computed with the steps that compute the prompt."""

    def __init__(self, most_lines: int, as_logits: bool, device: torch.device) -> None:
        self.most_lines = most_lines  # of logits at once: no more memory than sampling for all rows takes
        self.as_logits = as_logits
        self.device = device
        self._prompts: dict[int, tuple[NDArray[np.int32], int]] = {}  # by row: prompt, likeliest tokens wanted

    def open(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            self._prompts.pop(new.row, None)
            extras = new.sampling.extras
            if extras is not None and extras.prompt_logprobs is not None:
                assert new.token_ids is not None, "a row with extras comes with its tokens"
                self._prompts[new.row] = new.token_ids[: extras.num_prompt_tokens], extras.prompt_logprobs

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """What this step computes of prompts that are asked for."""
        if not self._prompts:
            return []
        found = []
        firsts = np.cumsum(plan.num_tokens) - plan.num_tokens
        for line, row in enumerate(plan.rows.tolist()):
            if row not in self._prompts:
                continue
            prompt, count = self._prompts[row]
            end = int(plan.bounds[line])  # exact: nothing of a prompt is still on the device
            start = end - int(plan.num_tokens[line]) + 1
            targets = prompt[start : end + 1]
            if len(targets):
                found.append(Chunk(line, int(firsts[line]), start, targets, count))
            if end + 1 >= len(prompt):
                del self._prompts[row]
        return found

    def score(
        self, chunks: list[Chunk], hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Three tensors (ids, values, ranks) for each chunk."""
        tensors: list[torch.Tensor] = []
        for chunk in chunks:
            (targets,) = upload([chunk.targets], self.device)
            parts = []
            for at in range(0, len(chunk.targets), self.most_lines):
                some = targets[at : at + self.most_lines]
                logits = head(hidden[chunk.first + at : chunk.first + at + len(some)])
                parts.append(top_logprobs(logits, some, chunk.count, as_logits=self.as_logits).tensors())
            tensors += [torch.cat(columns) for columns in zip(*parts, strict=True)]
        return tensors


def prompt_part(chunks: list[Chunk], arrays: Sequence[NDArray[Any]]) -> Part:
    """What `score` gave, once the host has it. Chunks that want fewer log-probabilities than others are padded."""
    lengths, most = [len(chunk.targets) for chunk in chunks], max(chunk.count for chunk in chunks)

    def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([np.pad(part, ((0, 0), (0, 1 + most - part.shape[1]))) for part in parts])

    return Part(
        index=np.repeat(np.array([chunk.line for chunk in chunks], np.int32), lengths),
        ints={
            "positions": np.concatenate([np.arange(c.start, c.start + len(c.targets), dtype=np.int32) for c in chunks]),
            "token_ids": joined(arrays[0 : 3 * len(chunks) : 3]),
            "ranks": np.concatenate(arrays[2 : 3 * len(chunks) : 3]),
        },
        floats={"values": joined(arrays[1 : 3 * len(chunks) : 3])},
    )
