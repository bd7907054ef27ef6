"""From logits to tokens and what features make of them, on the device, without a host sync.

Stages and features change logits and run only if some row of the step asks for them; the last of all draws
(kernels.draw). A row's token depends on its own logits, history, seed and position, and never on its neighbours in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import kernels
from kvasir.messages import Int32Array
from kvasir.sampling.features import Drawn, HeadWork, RowFeature, SampledRows
from kvasir.sampling.parameters import NO_SAMPLING_KEY, SamplingKey, SamplingParameters
from kvasir.sampling.stages import FORBIDDEN


@dataclass(slots=True)
class Processed:
    """The logits to draw from, before temperature."""

    logits: torch.Tensor  # [lines, vocabulary]
    threshold: torch.Tensor | None = None  # [lines] float32: the lowest logit that min-p, top-k and top-p keep

    def filtered(self) -> torch.Tensor:
        """The logits, without those that the filters drop."""
        if self.threshold is None:
            return self.logits
        return self.logits.masked_fill(self.logits < self.threshold[:, None], FORBIDDEN)


class Sampler:
    """`next_token` [rows] int32 is where the next step finds its inputs."""

    def __init__(
        self, parameters: SamplingParameters, next_token: torch.Tensor, features: Sequence[RowFeature] = ()
    ) -> None:
        self.parameters = parameters
        self.next_token = next_token
        self.features = list(features) or [parameters]

    def sample(
        self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork] = ()
    ) -> tuple[torch.Tensor, tuple[tuple[torch.Tensor, ...], ...]]:
        """Tokens [n] int32 from logits [n, vocab], and the output tensors of each piece of work. A line whose logits
        are not numbers has NOT_A_TOKEN; features see a valid token in its place. Waits for nothing, and reads nothing
        of the host's that differs from step to step, so that a graph can capture it."""
        if step.turns:
            tokens, heated = self._draw_in_turns(logits, step, work)
        else:
            processed = self.process(logits, step, work)
            tokens, heated = self.draw(processed, step, work), partial(self.heated, processed, step)
        drawn = Drawn(logits, heated, tokens.clamp(min=0) if work else tokens, step)
        return tokens, tuple(each.feature.outputs(each.key, drawn, each.inputs) for each in work)

    def _draw_in_turns(
        self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork]
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Draw as if each row's lines were steps of their own. A line whose draft was wrong is drawn, but nothing
        learns from it."""
        assert step.expected is not None, "lines in turns follow drafts"
        tokens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        counts = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        padding_row = len(self.parameters.temperature) - 1
        parts: list[tuple[torch.Tensor, Processed, SampledRows]] = []
        for number, turn in enumerate(step.turns):
            own, lines = step.select(turn), turn.lines
            if number:
                before = lines - 1
                counts[lines] = counts[before] & (tokens[before] == step.expected[before])
                own.observed_rows = torch.where(counts[lines], own.rows, padding_row)
            processed = self.process(logits[lines], own, work)
            tokens[lines] = self.draw(processed, own, work)
            parts.append((lines, processed, own))
            step.failures |= {int(turn.host_lines[line]): reason for line, reason in own.failures.items()}
            step.on_host += [partial(_tell, call, turn.host_lines) for call in own.on_host]

        def heated() -> torch.Tensor:
            whole = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            for lines, processed, own in parts:
                whole[lines] = self.heated(processed, own)
            return whole

        return tokens, heated

    def process(self, logits: torch.Tensor, step: SampledRows, work: Sequence[HeadWork]) -> Processed:
        """The given logits are left as they are. Masks come after the rules that may raise a logit, and before what
        narrows a distribution."""
        key = self._key(work)
        editing = [each for each in work if each.feature.edits_logits(each.key)]
        if key.stages or editing:
            logits = logits.to(torch.float32, copy=True)
        for stage in key.stages:
            if not stage.narrows:
                stage.apply(logits, step)
        if key.bans:
            logits = self._ban_stop_ids(logits, step.rows, step.positions)
        for each in editing:
            each.feature.edit_logits(each.key, logits, step, each.inputs)
        for stage in key.stages:
            if stage.narrows:
                stage.apply(logits, step)
        return Processed(logits, self._threshold(logits, step.rows) if key.filters else None)

    def draw(self, processed: Processed, step: SampledRows, work: Sequence[HeadWork]) -> torch.Tensor:
        """Draw, and let features replace tokens and learn which were taken. NOT_A_TOKEN stays what it is."""
        parameters = self.parameters
        drawn = kernels.draw(
            processed.logits, step.rows, step.positions, parameters.temperature, parameters.seed, self.next_token,
            processed.threshold,
        )  # fmt: skip
        if not (self._key(work).stages or any(each.feature is not parameters for each in work)):
            return drawn
        tokens = valid = drawn.clamp(min=0)
        for each in work:
            tokens = each.feature.replace_tokens(each.key, tokens, step, each.inputs)
        if tokens is not valid:
            self.next_token[step.rows] = tokens
        for each in work:
            each.feature.observe(each.key, tokens, step.as_observed())
        return torch.where(drawn < 0, drawn, tokens)

    def heated(self, processed: Processed, step: SampledRows) -> torch.Tensor:
        """Divided by the rows' temperatures, as `draw` does it; greedy rows have none."""
        heat = self.parameters.temperature[step.rows, None]
        return processed.filtered().float() / torch.where(heat > 0, heat, 1.0)

    def _key(self, work: Sequence[HeadWork]) -> SamplingKey:
        for each in work:
            if each.feature is self.parameters:
                key: SamplingKey = each.key
                return key
        return NO_SAMPLING_KEY

    def _ban_stop_ids(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        stop_ids = self.parameters.stop_ids[rows].long()
        banned = (positions < self.parameters.banned_until[rows])[:, None]
        values = torch.where(banned, FORBIDDEN, logits.gather(1, stop_ids))
        return logits.scatter(1, stop_ids, values)

    def _threshold(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        parameters = self.parameters
        return kernels.filter_threshold(
            logits, rows, parameters.temperature, parameters.min_p, parameters.top_k, parameters.top_p
        )


def _tell(call: Callable[[NDArray[np.int32]], None], lines: Int32Array, tokens: NDArray[np.int32]) -> None:
    """Pass the tokens of some lines on."""
    call(tokens[lines])
