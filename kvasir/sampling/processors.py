"""Python callables that change one row's logits, as a stage of the sampler. They read the row's tokens, so such a row
waits until its last token is on the host; other rows of the same steps do not wait. Worker process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import Extras, NewRow
from kvasir.sampling.features import SampledRows
from kvasir.sampling.stages import Stage


@dataclass(slots=True, eq=False)
class History:
    """The processors of one row, and the tokens that they are called with."""

    processors: tuple[Any, ...]  # called with (prompt, output, logits)
    prompt: list[int]
    output: list[int]


class Processors(Stage):
    def __init__(self, max_rows: int, device: torch.device) -> None:
        super().__init__(max_rows, device)
        self._histories: dict[int, History] = {}  # by slot

    def asks(self, extras: Extras) -> bool:
        return bool(extras.processors)

    def fill(self, new_rows: Sequence[NewRow], slots: list[int]) -> None:
        for new, slot in zip(new_rows, slots, strict=True):
            extras, tokens = new.sampling.extras, new.token_ids
            assert extras is not None and tokens is not None, "a row with extras comes with its tokens"
            virtual, given = extras.num_virtual_tokens, extras.num_prompt_tokens
            self._histories[slot] = History(extras.processors, tokens[virtual:given].tolist(), tokens[given:].tolist())

    def apply(self, logits: torch.Tensor, step: SampledRows) -> None:
        held = self.slots[step.host_rows]
        for line in np.flatnonzero(held >= 0).tolist():
            history = self._histories[int(held[line])]
            try:
                logits[line] = _processed(history, logits[line])
            except Exception as error:  # user code may raise anything; only its own request ends
                step.failures[line] = f"a logits processor failed: {type(error).__name__}: {error}"
            # bound to the history and not to the row, which another request may have by then
            step.on_host.append(partial(_append, history.output, line))


def _processed(history: History, logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    for process in history.processors:
        changed = process(history.prompt, history.output, changed)
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
            kind = f"shape {tuple(changed.shape)}" if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise TypeError(f"it must return logits of shape {tuple(logits.shape)}, not {kind}")
    if not bool((changed > -torch.inf).any()):  # nor is NaN
        raise ValueError("no token is left that could be drawn")
    return changed


def _append(output: list[int], line: int, tokens: NDArray[np.int32]) -> None:
    output.append(int(tokens[line]))
