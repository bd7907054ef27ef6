"""Prompts that are embeddings: what rows overlay on their first tokens. Worker process.

A row's embeddings come with the row, again after a preemption, and are dropped once its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from kvasir.errors import ConfigError
from kvasir.kernels.layout import upload
from kvasir.layers.embedding import StepOverlay
from kvasir.messages import Int32Array, NewRow, StepPlan
from kvasir.models.transformer import Transformer
from kvasir.sampling.features import NO_COLUMNS, ForwardUse, RowFeature


def overlay_of(model: object, hf: Mapping[str, Any]) -> StepOverlay:
    """Return the overlay of a model that takes embeddings as transformers does: after its embedding layer, with nothing
    in between."""
    reason = None
    if not isinstance(model, Transformer):
        reason = "transformers runs this model"
    elif not isinstance(model.project_in, nn.Identity):
        reason = "this model projects its embeddings"
    elif hf.get("embedding_multiplier", 1.0) != 1.0:
        reason = "this model multiplies its embeddings"
    if reason is not None:
        raise ConfigError(f"enable_prompt_embeds is not possible: {reason}. Leave it out.")
    assert isinstance(model, Transformer)
    return model.overlay


class PromptEmbeddings(RowFeature):
    changes_forward = True
    is_captured = False  # its steps are launched kernel by kernel

    def __init__(self, overlay: StepOverlay, dtype: torch.dtype, device: torch.device) -> None:
        self.overlay, self.dtype, self.device = overlay, dtype, device
        self._rows: dict[int, torch.Tensor] = {}  # [tokens, hidden]

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.embeddings is not None:
                self._rows[new.row] = torch.tensor(new.embeddings, dtype=self.dtype, device=self.device)
        return NO_COLUMNS

    def _overlaid(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Return the lines with overlaid tokens in this step: the line, the first position and their number."""
        found = []
        for line in np.flatnonzero(np.isin(plan.rows, list(self._rows))).tolist() if self._rows else ():
            row, first = int(plan.rows[line]), int(plan.bounds[line] - plan.num_tokens[line])
            count = len(self._rows[row]) - first
            if count > 0:
                found.append((line, first, min(count, int(plan.num_tokens[line]))))
            else:
                del self._rows[row]
        return found

    def forward_use(self, plan: StepPlan) -> ForwardUse:
        return ForwardUse.EAGER if self._overlaid(plan) else ForwardUse.PLAIN

    def begin_forward(
        self,
        use: ForwardUse,
        token_rows: torch.Tensor | None,
        rows: torch.Tensor,
        has_last: bool,
        plan: StepPlan | None,
    ) -> None:
        self.overlay.clear()
        if use is not ForwardUse.EAGER or plan is None or not (overlaid := self._overlaid(plan)):
            return
        starts: Int32Array = np.cumsum(plan.num_tokens, dtype=np.int32) - plan.num_tokens
        places = [np.arange(starts[line], starts[line] + count, dtype=np.int32) for line, _, count in overlaid]
        (tokens,) = upload([np.concatenate(places)], self.device)
        overlays = [self._rows[int(plan.rows[line])][first : first + count] for line, first, count in overlaid]
        self.overlay.set(tokens.long(), torch.cat(overlays))
