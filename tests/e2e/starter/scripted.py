"""A device that says what it is told, at a pace: everything around it (server, scheduler, cache, text) is real."""

from __future__ import annotations

import numpy as np

from kvasir.config.engine import EngineConfig
from kvasir.executor.fake import DelayExecutor, FakeFuture
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from kvasir.messages import LOGPROBS, Int32Array, Part, SampleInputs, StepPlan, StepResult


class Scripted(DelayExecutor):
    def __init__(self, block_size: int, delay: float, script: list[int]) -> None:
        super().__init__(block_size, delay)
        self.script = script
        self.said: dict[int, int] = {}  # by row

    def execute(self, plan: StepPlan) -> None:
        self.said |= {new.row: 0 for new in plan.new_rows}
        super().execute(plan)

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan = self._plan
        assert plan is not None, "sample follows execute"
        tokens = np.zeros((len(plan.rows), 1), np.int32)
        for line in np.flatnonzero(plan.samples):
            row = int(plan.rows[line])
            tokens[line] = self.script[min(self.said[row], len(self.script) - 1)]
            self.said[row] += 1
        result = StepResult(tokens, plan.samples.astype(np.int32))
        if plan.wants_logprobs:
            result.parts[LOGPROBS] = self._logprobs(tokens, np.flatnonzero(plan.samples).astype(np.int32))
        return FakeFuture(result, self.free_at)

    def _logprobs(self, tokens: Int32Array, lines: Int32Array) -> Part:
        """The token is half of it, its neighbours in the vocabulary the rest."""
        ids = tokens[lines] + np.arange(21, dtype=np.int32) - 1
        ids[:, 0] = tokens[lines, 0]
        values = np.log(0.5 ** np.maximum(np.arange(21, dtype=np.float32), 1))
        ints = {"token_ids": ids, "ranks": np.ones(len(lines), np.int32)}
        return Part(lines, ints, {"values": np.tile(values, (len(lines), 1))})


def make(config: EngineConfig, text: str, delay: float) -> Scripted:
    tokenizer = load_tokenizer(config.model.tokenizer)
    assert tokenizer.eos_token_id is not None
    return Scripted(config.cache.block_size, delay, [*tokenizer.encode(text), tokenizer.eos_token_id])
