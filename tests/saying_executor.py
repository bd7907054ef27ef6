"""A device that says what the prompt tells it to: everything around it (server, scheduler, cache, text) is real.

The first text between « and » in the prompt is said; after k results of tools, the k-th further one. A step that is
held to a grammar takes the next allowed token instead, as the echo executor does.
"""

from __future__ import annotations

import re

import numpy as np

from kvasir.config.engine import EngineConfig
from kvasir.executor.fake import EchoExecutor, FakeFuture
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from kvasir.messages import SampleInputs, StepPlan, StepResult

_TEXT = re.compile("«(.*?)»", re.DOTALL)
_RESULT = re.compile("<tool_response>|kvasir-result")


class SayingExecutor(EchoExecutor):
    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        scheduler, model = config.scheduler, config.model
        super().__init__(config.cache.block_size, scheduler.max_num_seqs, model.max_model_len, model.vocab_size)
        self.tokenizer = tokenizer
        self.scripts: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.scripts.pop(new.row, None)
        super().execute(plan)

    def _begin(self, row: int) -> None:
        """Read the prompt back, when it is computed."""
        length = int(self.computed[row])
        text = self.tokenizer.decode(self._read(0, row, length).tolist())
        told = _TEXT.findall(text) or ["Hello."]
        place = min(len(_RESULT.findall(text)), len(told) - 1)
        assert self.tokenizer.eos_token_id is not None
        self.scripts[row] = [*self.tokenizer.encode(told[place], add_special_tokens=False), self.tokenizer.eos_token_id]
        self.lengths[row] = length

    def sample(self, inputs: SampleInputs | None = None) -> FakeFuture:
        plan = self._plan
        assert plan is not None, "sample must follow execute"
        inputs = inputs or SampleInputs()
        masks = dict(zip(inputs.mask_lines.tolist(), inputs.masks, strict=True))
        forced = dict(zip(inputs.forced_lines.tolist(), inputs.forced_tokens.tolist(), strict=True))
        samples = plan.samples.copy()
        samples[inputs.dropped_lines] = False
        tokens = np.zeros((len(plan.rows), 1), np.int32)
        for line in np.flatnonzero(samples):
            row = int(plan.rows[line])
            if row not in self.scripts:
                self._begin(row)
            script = self.scripts[row]
            token = forced.get(int(line), script[min(int(self.computed[row]) - self.lengths[row], len(script) - 1)])
            while line in masks and not masks[line][token // 32] >> token % 32 & 1:
                token = (token + 1) % self.vocab
            tokens[line, 0] = self.next_token[row] = token
        return FakeFuture(StepResult(tokens, samples.astype(np.int32)))


def saying(config: EngineConfig) -> SayingExecutor:
    return SayingExecutor(config, load_tokenizer(config.model.tokenizer))
