"""From logits to tokens, on the device, without a host sync. Plain torch: the reference for faster kernels.

The draw is an inverse CDF in vocabulary order with one stateless uniform number per row, so that a row's token
depends on its own logits, seed and position, and never on its neighbours in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.sampling.random import MASK, uniform
from kvasir.sampling.state import Needs, SamplingState

NEVER = float("-inf")


@dataclass(slots=True)
class TopLogprobs:
    token_ids: torch.Tensor  # [lines, 1 + n] int32, the sampled token first
    values: torch.Tensor  # [lines, 1 + n] float32
    ranks: torch.Tensor  # [lines] int32


class Sampler:
    def __init__(self, state: SamplingState) -> None:
        self.state = state

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Tokens [n] int64 for `rows` [n] at `positions` [n], from logits [n, vocab] float32."""
        if needs.bans:
            logits = self._ban_stop_ids(logits, rows, positions)
        greedy = logits.argmax(dim=-1)
        if not needs.random:
            return greedy
        temperature = self.state.temperature[rows]
        is_random = temperature > 0
        scaled = logits / torch.where(is_random, temperature, 1.0)[:, None]
        if needs.filters:
            scaled = self._filter(scaled, rows)
        drawn = draw(scaled, uniform(self.state.seed[rows].long() & MASK, positions), greedy)
        return torch.where(is_random, drawn, greedy)

    def _ban_stop_ids(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        stop_ids = self.state.stop_ids[rows].long()
        banned = (positions < self.state.banned_until[rows])[:, None]
        values = torch.where(banned, NEVER, logits.gather(1, stop_ids))
        return logits.scatter(1, stop_ids, values)

    def _filter(self, scaled: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Min-p, then top-k, then top-p, each over what the one before left. Ties at a threshold are kept."""
        min_p, top_k, top_p = self.state.min_p[rows], self.state.top_k[rows], self.state.top_p[rows]
        ordered = scaled.sort(dim=-1, descending=True).values
        vocab = scaled.shape[-1]
        rank = torch.arange(vocab, device=scaled.device)
        # p(token) >= min_p * p(best) is a difference of logits; log(0) = -inf turns it off
        least = ordered[:, :1] + min_p.log()[:, None]
        kept = ordered >= least
        kept &= rank < torch.where(top_k > 0, top_k, vocab)[:, None]
        probs = torch.softmax(ordered.masked_fill(~kept, NEVER), dim=-1)
        kept &= probs.cumsum(dim=-1) - probs < torch.where(top_p < 1, top_p, 2.0)[:, None]
        last = kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1  # the kept ones stand first, and the best always stays
        return scaled.masked_fill(scaled < ordered.gather(1, last), NEVER)


def draw(scaled: torch.Tensor, numbers: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of probabilities first exceeds each row's number."""
    weights = torch.exp(scaled - scaled.max(dim=-1, keepdim=True).values)
    sums = weights.cumsum(dim=-1)
    goal = (numbers * sums[:, -1].double()).to(sums.dtype)
    token = torch.searchsorted(sums, goal[:, None], right=True).squeeze(1)
    # rounding may put the goal at the very end, past every token
    return torch.where(token < scaled.shape[-1], token, fallback)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> TopLogprobs:
    """Of the unmodified logits [lines, vocab]: the sampled tokens' log-probabilities and ranks, and the top `count`."""
    chosen = logits.gather(1, tokens[:, None])
    best = logits.topk(count, dim=-1) if count else None
    ids = tokens[:, None] if best is None else torch.cat([tokens[:, None], best.indices], dim=1)
    values = chosen if best is None else torch.cat([chosen, best.values], dim=1)
    return TopLogprobs(
        token_ids=ids.to(torch.int32),
        values=values - logits.logsumexp(dim=-1, keepdim=True),
        ranks=((logits > chosen).sum(dim=-1) + 1).to(torch.int32),
    )
