"""What each API key may ask for: requests and tokens per minute, requests at once. One API process's share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.server.errors import ApiError
from kvasir.server.keys import Key


class Bucket:
    """Fills at a steady rate up to a minute's worth; what is taken may leave it owing."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.rate = per_minute / 60
        self.capacity = max(per_minute, 1.0)
        self.level = self.capacity
        self._clock = clock
        self._at = clock()

    def wait(self, amount: float) -> float:
        """Seconds until so much is there; more than the capacity is never there, and a full bucket will do."""
        now = self._clock()
        self.level = min(self.capacity, self.level + (now - self._at) * self.rate)
        self._at = now
        return max(0.0, (min(amount, self.capacity) - self.level) / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(slots=True)
class _Account:
    requests: Bucket | None
    tokens: Bucket | None
    most_at_once: float | None
    running: int = 0


class RateLimits:
    """All keys' accounts in this process. With several API processes each keeps its share of every limit."""

    def __init__(self, num_processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = 1 / num_processes
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, key: Key, num_tokens: int, num_requests: int = 1) -> None:
        """Take what a request needs, or raise a 429 that says when to come back. Call `release` when it has ended."""
        account = self._account(key)
        if account.most_at_once is not None and account.running + 1 > account.most_at_once:
            raise _limited(key, f"max_concurrent={key.max_concurrent:g}", 1.0)
        for bucket, amount, name in (
            (account.requests, num_requests, f"requests_per_minute={key.requests_per_minute}"),
            (account.tokens, num_tokens, f"tokens_per_minute={key.tokens_per_minute}"),
        ):
            if bucket is not None and (wait := bucket.wait(amount)) > 0:
                raise _limited(key, name, wait)
        for bucket, amount in ((account.requests, num_requests), (account.tokens, num_tokens)):
            if bucket is not None:
                bucket.take(amount)
        account.running += 1

    def release(self, key: Key, num_generated: int) -> None:
        """A request has ended; its generated tokens count, too, returned or not."""
        account = self._account(key)
        account.running -= 1
        if account.tokens is not None:
            account.tokens.take(num_generated)

    def _account(self, key: Key) -> _Account:
        found = self._accounts.get(key.name)
        if found is None:
            found = self._accounts[key.name] = _Account(
                self._bucket(key.requests_per_minute),
                self._bucket(key.tokens_per_minute),
                None if key.max_concurrent is None else max(1.0, key.max_concurrent * self.share),
            )
        return found

    def _bucket(self, per_minute: float | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute * self.share, self._clock)


def _limited(key: Key, limit: str, wait: float) -> ApiError:
    message = f"The key {key.name!r} has reached its limit {limit}; try again in {wait:.1f} s."
    return ApiError(429, message, "rate_limit", code="rate_limit_exceeded", retry_after=wait)
