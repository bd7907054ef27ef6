"""From logits to tokens and their log-probabilities, on the device, without a host sync.

Stages change logits and are run only if some row of the step asks for them; the last of all draws (kernels.draw). A
row's token depends on its own logits, history, seed and position, and never on its neighbours in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir import kernels
from kvasir.sampling.logprobs import TokenScores
from kvasir.sampling.penalties import Penalties
from kvasir.sampling.processors import Processors
from kvasir.sampling.stages import NEVER, SampledRows, Stages
from kvasir.sampling.state import Needs, SamplingState
from kvasir.sampling.tokens import BadWords, Bans, Bias
from kvasir.sampling.top_ema import TopEma


def make_stages(max_rows: int, vocab_size: int, state: SamplingState, device: torch.device) -> Stages:
    """In vLLM's order where it matters: the callers' own processors, bias, penalties, then what is forbidden."""
    return Stages(
        [
            Processors(max_rows, device),
            Bias(max_rows, device),
            Penalties(max_rows, vocab_size, device),
            Bans(max_rows, vocab_size, device),
            BadWords(max_rows, device),
            TopEma(max_rows, state.temperature, device),
        ]
    )


@dataclass(slots=True)
class Processed:
    """What to draw from, but for temperature."""

    logits: torch.Tensor  # [lines, vocabulary]
    floor: torch.Tensor | None = None  # [lines] float32: the lowest that min-p, top-k and top-p keep

    def filtered(self) -> torch.Tensor:
        """The logits, without what the filters drop."""
        if self.floor is None:
            return self.logits
        return self.logits.masked_fill(self.logits < self.floor[:, None], NEVER)


class Sampler:
    """`next_token` [rows] int32 is where the next step finds its inputs."""

    def __init__(self, state: SamplingState, next_token: torch.Tensor, scores: TokenScores) -> None:
        self.state = state
        self.next_token = next_token
        self.scores = scores

    def sample(
        self, logits: torch.Tensor, step: SampledRows, needs: Needs, scored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Tokens [n] int32 from logits [n, vocab]; with `scored` [m] int32, which lines want log-probabilities, then
        the ids, values and ranks of those. Waits for nothing, and reads nothing of the host's that a graph could not
        have known: a head that is captured runs this as one that is not."""
        processed = self.process(logits, step, needs)
        tokens = self.draw(processed, step, needs)
        if scored is None:
            return (tokens,)
        found = self.scores.score(
            logits, lambda: self.heated(processed, step), tokens, step.rows, scored, needs.num_logprobs, needs.named
        )
        return tokens, *found.tensors()

    def process(self, logits: torch.Tensor, step: SampledRows, needs: Needs) -> Processed:
        """The given logits are left as they are."""
        if needs.stages:
            logits = logits.to(torch.float32, copy=True)
        for stage in needs.stages:
            if not stage.narrows:
                stage.apply(logits, step)
        if needs.bans:
            logits = self._ban_stop_ids(logits, step.rows, step.positions)
        for stage in needs.stages:
            if stage.narrows:
                stage.apply(logits, step)
        return Processed(logits, self._floor(logits, step.rows) if needs.filters else None)

    def draw(self, processed: Processed, step: SampledRows, needs: Needs) -> torch.Tensor:
        state = self.state
        tokens = kernels.draw(
            processed.logits, step.rows, step.positions, state.temperature, state.seed, self.next_token, processed.floor
        )
        for stage in needs.stages:
            stage.observe(tokens, step)
        return tokens

    def heated(self, processed: Processed, step: SampledRows) -> torch.Tensor:
        """Divided by the rows' temperatures, as `draw` does it; greedy rows have none."""
        heat = self.state.temperature[step.rows, None]
        return processed.filtered().float() / torch.where(heat > 0, heat, 1.0)

    def _ban_stop_ids(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        stop_ids = self.state.stop_ids[rows].long()
        banned = (positions < self.state.banned_until[rows])[:, None]
        values = torch.where(banned, NEVER, logits.gather(1, stop_ids))
        return logits.scatter(1, stop_ids, values)

    def _floor(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        state = self.state
        return kernels.logit_floor(logits, rows, state.temperature, state.min_p, state.top_k, state.top_p)
