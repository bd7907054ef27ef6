"""Counts what the API process sees of requests: tokens, finishes, latencies. Touched once per finished request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvasir.outputs import RequestMetrics


@dataclass(slots=True)
class FrontendMetrics:
    """Totals since the start. `snapshot` gives them under vLLM's names."""

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    first_token: tuple[int, float] = (0, 0.0)  # how many requests, seconds in all
    queue: tuple[int, float] = (0, 0.0)
    latency: tuple[int, float] = (0, 0.0)

    def observe(self, metrics: RequestMetrics, num_prompt_tokens: int, num_cached_tokens: int, reason: str) -> None:
        """One request has ended."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += num_cached_tokens
        self.generation_tokens += metrics.num_generation_tokens
        self.finished[reason] += 1
        self.first_token = _plus(self.first_token, metrics.time_to_first_token)
        self.queue = _plus(self.queue, metrics.time_in_queue)
        self.latency = _plus(self.latency, metrics.latency)

    def snapshot(self) -> dict[str, float]:
        counts = {f"request_success_{reason}": float(count) for reason, count in sorted(self.finished.items())}
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            "generation_tokens": self.generation_tokens,
            **counts,
            "time_to_first_token_seconds_count": self.first_token[0],
            "time_to_first_token_seconds_sum": self.first_token[1],
            "request_queue_time_seconds_count": self.queue[0],
            "request_queue_time_seconds_sum": self.queue[1],
            "e2e_request_latency_seconds_count": self.latency[0],
            "e2e_request_latency_seconds_sum": self.latency[1],
        }


def _plus(total: tuple[int, float], seconds: float | None) -> tuple[int, float]:
    return total if seconds is None else (total[0] + 1, total[1] + seconds)
