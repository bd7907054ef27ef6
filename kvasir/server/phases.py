"""Where the server is in its life, and how long each part of the start took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvasir.log import get_logger

logger = get_logger(__name__)

STARTING = ("settings", "model", "first token")  # in order; then it is ready
READY, DRAINING, FAILED = "ready", "draining", "failed"


class Phases:
    def __init__(self, report: Callable[[str, float], None] = lambda phase, seconds: None) -> None:
        self.now = STARTING[0]
        self.seconds: dict[str, float] = {}
        self.reason = ""  # why it failed
        self._report = report
        self._since = self._start = time.monotonic()

    def enter(self, phase: str) -> None:
        """The phase so far is done."""
        now = time.monotonic()
        if self.now in STARTING:
            took = self.seconds[self.now] = now - self._since
            self._report(self.now, took)
            logger.info("start-up: %s took %.2f s", self.now, took)
            if phase == READY:
                total = self.seconds["total"] = now - self._start
                self._report("total", total)
                logger.info("ready after %.2f s", total)
        self.now, self._since = phase, now

    def note(self, parts: Mapping[str, float]) -> None:
        """What the engine's process says of its own start, which is within ours."""
        for name, took in parts.items():
            self.seconds[f"engine: {name}"] = took
            self._report(f"engine: {name}", took)
        if parts:
            words = (f"{name} {took:.2f} s" for name, took in parts.items())
            logger.info("start-up of the engine: %s", ", ".join(words))

    def fail(self, reason: str) -> None:
        self.now, self.reason = FAILED, reason

    @property
    def is_ready(self) -> bool:
        return self.now == READY
