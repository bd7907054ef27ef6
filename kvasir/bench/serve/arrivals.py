"""When requests arrive: all at once, at a rate with more or less of a burst in it, at a rate that grows, or as in a
trace. Seconds from the start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvasir.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps between requests follow a gamma distribution: burstiness 1 is a Poisson process, below it comes in bursts,
    above it is more even."""

    rate: float = math.inf  # requests per second
    burstiness: float = 1.0
    ramp: str | None = None  # "linear" or "exponential": from `rate` to `end_rate` over the run
    end_rate: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--request-rate", self.rate), ("--burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"{name} must be more than 0, not {value:g}.")
        if self.ramp is not None and (self.end_rate is None or not 0 < self.end_rate < math.inf):
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0.")
        if self.ramp is not None and self.rate == math.inf:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps.")

    def times(self, count: int, seed: int = 0) -> list[float]:
        if self.rate == math.inf:
            return [0.0] * count
        rng = random.Random(seed)
        gaps = [self._gap(rng, rate) for rate in self._rates(count)]
        return list(accumulate([0.0, *gaps[1:]])) if count else []

    def _rates(self, count: int) -> Iterator[float]:
        for i in range(count):
            share = i / max(1, count - 1)
            if self.ramp is None or self.end_rate is None:
                yield self.rate
            elif self.ramp == "linear":
                yield self.rate + (self.end_rate - self.rate) * share
            else:
                yield self.rate * (self.end_rate / self.rate) ** share

    def _gap(self, rng: random.Random, rate: float) -> float:
        return rng.gammavariate(self.burstiness, 1.0 / (rate * self.burstiness))


def from_trace(stamps: Sequence[float], speedup: float) -> list[float]:
    """A trace's own times, from its first request on, `speedup` times as fast."""
    if not speedup > 0:
        raise ConfigError(f"--trace-speedup must be more than 0, not {speedup:g}.")
    return [(stamp - stamps[0]) / speedup for stamp in stamps]
