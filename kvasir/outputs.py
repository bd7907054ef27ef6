"""Output classes with vLLM's names: RequestOutput, CompletionOutput, Logprob, RequestMetrics, and those of pooling
models. Any process.

With RequestOutputKind.CUMULATIVE, all outputs of a request share the same growing lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


class FlatLogprobs(Sequence[dict[int, Logprob] | None]):
    """Log-probabilities of many positions in a few flat lists, with far fewer objects than a dict per position.

    It behaves like a list of dicts. The entries of position i are those from `start_indices[i]` to `end_indices[i]`.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, entry: Iterable[tuple[int, float, int | None, str | None]] | None) -> None:
        """Add a position: (token id, value, rank, text) for each of its tokens, or None for no tokens."""
        self.start_indices.append(len(self.token_ids))
        for token, value, rank, text in entry or ():
            self.token_ids.append(token)
            self.logprobs.append(value)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs | None:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self._entries(position) or None)
            return part
        return {t: Logprob(value, rank, text) for t, value, rank, text in self._entries(index)} or None

    def __add__(self, later: FlatLogprobs) -> FlatLogprobs:
        both = self[:]
        for position in range(len(later)):
            both.append(later._entries(position) or None)
        return both

    def _entries(self, position: int) -> list[tuple[int, float, int | None, str | None]]:
        at = slice(self.start_indices[position], self.end_indices[position])
        columns = (self.token_ids[at], self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
        return list(zip(*columns, strict=True))


# One dict per position: first the token itself, then the most likely ones in order.
SampleLogprobs = list[dict[int, Logprob]] | FlatLogprobs
PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs  # None for the first token, which has no prediction


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request. Times are in seconds on the same clock as `arrival_time`."""

    arrival_time: float
    first_scheduled_time: float | None = None  # None before the request is scheduled
    first_token_time: float | None = None  # None before the first token
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    max_num_generation_tokens: int = 0  # of its longest completion
    num_unreturned_tokens: int = 0  # of completions that are not returned (best_of); known at the end

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to finish."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "repetition", "error", "timeout", "abort"; None while it runs
    stop_reason: int | str | None = None  # stop string, token id or error message; None for the model's end token
    lora_request: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None  # of the prompt; None before the request is scheduled
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search."""

    tokens: list[int]  # prompt and output; the stop token only with include_stop_str_in_output
    cum_logprob: float
    text: str  # of all tokens, with special tokens
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0  # log-probability / length ** length_penalty; the ranking also subtracts diversity penalties


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences that a beam search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


# ---------------------------------------------------------------- pooling models


@dataclass(slots=True)
class PoolingOutput:
    """What a pooler made of a prompt: one vector, or one for each token."""

    data: NDArray[np.float32]  # [size], or [tokens, size]


@dataclass(slots=True)
class PoolingRequestOutput:
    """A request to a pooling model and its result."""

    request_id: str
    outputs: Any  # PoolingOutput, or the output of one task, as below
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    finish_reason: str | None = None  # "stop"; otherwise there are no data: "abort", "error", "timeout"
    error: str | None = None

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> Self:
        """The same output with the result in the form of one task."""
        own = _TASK_OUTPUTS[cls](output.outputs.data)
        tokens, cached = output.prompt_token_ids, output.num_cached_tokens
        return cls(output.request_id, own, tokens, output.finished, cached, output.metrics, output.finish_reason)


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


class EmbeddingRequestOutput(PoolingRequestOutput):
    """Its outputs are an EmbeddingOutput."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """Its outputs are a ClassificationOutput."""


class ScoringRequestOutput(PoolingRequestOutput):
    """Its outputs are a ScoringOutput."""


_TASK_OUTPUTS: dict[type, Any] = {
    EmbeddingRequestOutput: lambda data: EmbeddingOutput(data.tolist()),
    ClassificationRequestOutput: lambda data: ClassificationOutput(data.tolist()),
    ScoringRequestOutput: lambda data: ScoringOutput(float(data.reshape(-1)[0])),
}
