"""Drafts from the request's own text: what followed its last tokens where they occurred before. No model is needed; it
pays where an answer repeats its prompt or itself, as edits of code and summaries do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvasir import kernels
from kvasir.kernels.layout import upload
from kvasir.messages import NewRow
from kvasir.worker.speculative.drafter import DRAFTERS, Drafter, DrafterSettings, DraftRows, TokensTaken


@DRAFTERS.register("ngram", "lookup", "suffix")
class LookupDrafter(Drafter):
    """Keeps the text of every row on the device. `suffix` takes the latest of the longest matches, the others the
    earliest, as vLLM and transformers do."""

    capturable = True

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.width = self.max_model_len + self.num_drafts + 1  # wrong drafts may stand behind a text's end
        self.history = _zeros(self.max_rows, self.width, self.device)
        self._columns = torch.arange(1 + self.num_drafts, dtype=torch.int32, device=self.device)

    def open(self, new_rows: Sequence[NewRow], rows: torch.Tensor) -> None:
        texts = [new.token_ids for new in new_rows if new.token_ids is not None]
        known = [new.row for new in new_rows if new.token_ids is not None]
        if not texts:
            return
        lengths = [len(text) for text in texts]
        columns = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        places = upload([np.repeat(np.array(known, np.int32), lengths), columns, np.concatenate(texts)], self.device)
        self.history[places[0].long(), places[1].long()] = places[2]

    def learn(self, taken: TokensTaken) -> None:
        if taken.tokens.shape[1] == 1:
            self.history[taken.rows, taken.lengths - 1] = taken.tokens[:, 0]
            return
        places = (taken.lengths - taken.counts)[:, None] + self._columns
        self.history[taken.rows[:, None], places.clamp(max=self.width - 1)] = taken.tokens

    def propose(self, taken: TokensTaken, drafts: DraftRows) -> None:
        config = self.config
        kernels.lookup_drafts(
            self.history, taken.rows, taken.lengths, drafts.tokens, drafts.counts,
            config.prompt_lookup_min, config.prompt_lookup_max, config.method == "suffix",
        )  # fmt: skip


def _zeros(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """On a CPU numpy's zeros take memory when they are first used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, width), np.int32))
    return torch.zeros(rows, width, dtype=torch.int32, device=device)
