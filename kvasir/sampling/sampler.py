"""From logits to tokens, on the device, without a host sync.

Bans and filters are stages that change logits, run only if some row of the step asks for them; the last stage draws
(kernels.draw). A row's token depends on its own logits, seed and position, and never on its neighbours in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir import kernels
from kvasir.sampling.state import Needs, SamplingState

NEVER = float("-inf")


@dataclass(slots=True)
class TopLogprobs:
    token_ids: torch.Tensor  # [lines, 1 + n] int32, the sampled token first
    values: torch.Tensor  # [lines, 1 + n] float32
    ranks: torch.Tensor  # [lines] int32


class Sampler:
    """`next_token` [rows] int32 is where the next step finds its inputs."""

    def __init__(self, state: SamplingState, next_token: torch.Tensor) -> None:
        self.state = state
        self.next_token = next_token

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Tokens [n] int32 for `rows` [n] at `positions` [n], from logits [n, vocab]."""
        if needs.bans:
            logits = self._ban_stop_ids(logits, rows, positions)
        if needs.filters:
            logits = self._filter(logits, rows)
        return kernels.draw(logits, rows, positions, self.state.temperature, self.state.seed, self.next_token)

    def _ban_stop_ids(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        stop_ids = self.state.stop_ids[rows].long()
        banned = (positions < self.state.banned_until[rows])[:, None]
        values = torch.where(banned, NEVER, logits.gather(1, stop_ids))
        return logits.scatter(1, stop_ids, values)

    def _filter(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Only what min-p, top-k and top-p keep."""
        state = self.state
        floor = kernels.logit_floor(logits, rows, state.temperature, state.min_p, state.top_k, state.top_p)
        return logits.masked_fill(logits < floor[:, None], NEVER)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Of the unmodified logits [lines, vocab]: the sampled tokens' log-probabilities and ranks, and the top `count`."""
    logits, tokens = logits.float(), tokens.long()
    chosen = logits.gather(1, tokens[:, None])
    best = logits.topk(count, dim=-1) if count else None
    ids = tokens[:, None] if best is None else torch.cat([tokens[:, None], best.indices], dim=1)
    values = chosen if best is None else torch.cat([chosen, best.values], dim=1)
    return TopLogprobs(
        token_ids=ids.to(torch.int32),
        values=values - logits.logsumexp(dim=-1, keepdim=True),
        ranks=((logits > chosen).sum(dim=-1) + 1).to(torch.int32),
    )
