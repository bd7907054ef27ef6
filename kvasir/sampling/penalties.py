"""Presence, frequency and repetition penalties. Counts of a row's tokens live on the device and learn each drawn token
there, so that such rows run as asynchronously as others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvasir import kernels
from kvasir.messages import Extras, NewRow
from kvasir.sampling.stages import SampledRows, Stage, bits, mark, ragged


class Penalties(Stage):
    capturable = True
    tables = ("counts", "in_prompt", "presence", "frequency", "repetition")

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self.counts = self.table(vocab_size, dtype=torch.int32)  # how often each token was generated
        self.in_prompt = self.table(vocab_size, dtype=torch.bool)
        self.presence, self.frequency, self.repetition = self.table(), self.table(), self.table()

    def asks(self, extras: Extras) -> bool:
        return bool(extras.presence_penalty or extras.frequency_penalty or extras.repetition_penalty != 1)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        given, generated, parameters = [], [], []
        for new in new_rows:
            extras, tokens = new.sampling.extras, new.token_ids
            assert extras is not None and tokens is not None, "a row with extras comes with its tokens"
            given.append(tokens[: extras.num_prompt_tokens])
            generated.append(tokens[extras.num_prompt_tokens :])
            parameters += [extras.presence_penalty, extras.frequency_penalty, extras.repetition_penalty]
        prompt_slots, prompt, output_slots, output, own, floats = self.upload(
            *ragged(given, slots), *ragged(generated, slots), np.array(slots, np.int32), bits(parameters)
        )
        own = own.long()
        values = floats.view(torch.float32).view(-1, 3)
        self.presence[own], self.frequency[own], self.repetition[own] = values[:, 0], values[:, 1], values[:, 2]
        self.counts.index_fill_(0, own, 0)
        self.in_prompt.index_fill_(0, own, False)
        mark(self.in_prompt, prompt_slots, prompt, True)
        ones = torch.ones_like(output)
        self.counts.index_put_((output_slots.long(), output.long()), ones, accumulate=True)

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        kernels.penalize(
            logits, step.rows, self.device_slots, self.counts, self.in_prompt,
            self.presence, self.frequency, self.repetition,
        )  # fmt: skip

    def observe(self, tokens: torch.Tensor, step: SampledRows) -> None:
        kernels.count_tokens(tokens, step.rows, self.device_slots, self.counts)
