"""What callers get back, with vLLM's names: RequestOutput, its CompletionOutput, Logprob and RequestMetrics.

Plain data. Under RequestOutputKind.CUMULATIVE the lists of one request's outputs are one and the same, growing list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None  # 1: the likeliest
    decoded_token: str | None = None


# One dict per position: the sampled token first, then the likeliest ones in order.
SampleLogprobs = list[dict[int, Logprob]]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the clock that the caller's `arrival_time` is on."""

    arrival_time: float
    first_token_time: float | None = None  # None where tokens came all at once, with the finish
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """From arrival to finish."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id; None for the model's own end token
    lora_request: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and what has been generated for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None  # known once the request has ended
    kv_transfer_params: dict[str, Any] | None = None
