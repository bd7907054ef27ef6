"""The echo executor with log-probabilities: made up, but of the right tokens, shapes and order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.config.engine import EngineConfig
from kvasir.executor.fake import EchoExecutor, FakeFuture
from kvasir.messages import LOGPROBS, PROMPT_LOGPROBS, Int32Array, Part, RowSampling, SampleInputs, StepPlan

Scores = tuple[Int32Array, np.ndarray, Int32Array]


class ScoringEcho(EchoExecutor):
    def __init__(self, config: EngineConfig) -> None:
        scheduler, model = config.scheduler, config.model
        super().__init__(config.cache.block_size, scheduler.max_num_seqs, model.max_model_len, model.vocab_size)
        self.asked: dict[int, RowSampling] = {}
        self.texts: dict[int, Int32Array] = {}  # of rows that want their prompt scored
        self.prompt_parts: list[Part] = []

    def execute(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.asked[new.row] = new.sampling
            self.texts.pop(new.row, None)
            if new.sampling.extras is not None and new.token_ids is not None:
                self.texts[new.row] = new.token_ids
        starts = {row: int(self.computed[row]) for row in plan.rows.tolist()}
        starts |= {new.row: new.num_computed for new in plan.new_rows}
        self.prompt_parts = [
            part
            for line, (row, count) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
            if (part := self._score_prompt(line, row, starts[row], count)) is not None
        ]
        super().execute(plan)

    def _score_prompt(self, line: int, row: int, start: int, count: int) -> Part | None:
        extras = self.asked[row].extras
        if extras is None or extras.prompt_logprobs is None:
            return None
        end = min(start + count + 1, extras.num_prompt_tokens)
        tokens = self.texts[row][start + 1 : end]
        if not len(tokens):
            return None
        part = logprobs_part(np.full(len(tokens), line, np.int32), *self._score(tokens, extras.prompt_logprobs))
        part.ints["positions"] = np.arange(start + 1, end, dtype=np.int32)
        return part

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan, ready = self._plan, super().sample(inputs)
        assert plan is not None
        if self.prompt_parts:
            ready.value.parts[PROMPT_LOGPROBS] = joined(self.prompt_parts)
        asked = [self.asked[row] for row in plan.rows.tolist()]
        lines = np.array([i for i in np.flatnonzero(plan.samples) if asked[i].logprobs is not None], np.int32)
        if len(lines):
            named = [len(each.extras.logprob_token_ids) for each in asked if each.extras is not None]
            count = max([each.logprobs or 0 for each in asked] + named)
            scores = self._score(ready.value.token_ids[lines, 0], count)
            for place, line in enumerate(lines.tolist()):
                self._score_named(asked[line], scores, place)
            ready.value.parts[LOGPROBS] = logprobs_part(lines, *scores)
        return ready

    def _score_named(self, asked: RowSampling, scores: Scores, line: int) -> None:
        """Score the tokens that a request names: each differently, and differently behind each token."""
        named = () if asked.extras is None else asked.extras.logprob_token_ids
        ids, values, _ = scores
        for column, token in enumerate(named, start=1):
            ids[line, column] = token
            values[line, column] = values[line, 0] if token == ids[line, 0] else -1 - (token * 7 + ids[line, 0]) % 5

    def _score(self, tokens: Int32Array, count: int) -> Scores:
        """The token is the likeliest; its neighbours follow."""
        ids = (tokens[:, None] + np.arange(count)) % self.vocab
        ids = np.concatenate([tokens[:, None], ids], axis=1).astype(np.int32)
        values = -0.5 - np.concatenate([[0.0], np.arange(count)])[None].repeat(len(tokens), 0)
        return ids, values.astype(np.float32), np.ones(len(tokens), np.int32)


def scoring_echo(config: EngineConfig) -> ScoringEcho:
    return ScoringEcho(config)


def logprobs_part(lines: Int32Array, ids: Int32Array, values: NDArray[np.float32], ranks: Int32Array) -> Part:
    return Part(lines, {"token_ids": ids, "ranks": ranks}, {"values": values})


def joined(parts: list[Part]) -> Part:
    """Parts with as many columns as the widest."""
    width = max(part.ints["token_ids"].shape[1] for part in parts)

    def column(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        if arrays[0].ndim == 2:
            arrays = [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in arrays]
        return np.concatenate(arrays)

    return Part(
        np.concatenate([part.index for part in parts]),
        {name: column([part.ints[name] for part in parts]) for name in parts[0].ints},
        {name: column([part.floats[name] for part in parts]) for name in parts[0].floats},
    )
